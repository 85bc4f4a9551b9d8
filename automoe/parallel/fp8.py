"""Products in 8 bits (``train.fp8``): their scales, and the exchange of scales between ranks.

``ParamSpec.fp8`` selects the products: linear layers of attention and of dense and shared FFNs, and
the routed experts. Everything else keeps its precision: embedding, head, router, norms, the scores
of attention, a shared expert's output gate, and the small projection to a delta net's decays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from automoe.comm.collectives import communicator
from automoe.comm.local_shard import take_over
from automoe.config.mesh_shape import gathers_once
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.model.causal_lm import CausalLM
from automoe.model.linear import Linear
from automoe.model.params import find_spec
from automoe.moe.quantized import QuantizedExperts
from automoe.parallel.mesh import Meshes
from automoe.quantize.formats import E4M3, E5M2
from automoe.quantize.linear import QuantizedProduct
from automoe.quantize.scaling import (
    AmaxReduce,
    Blockwise,
    Delayed,
    Scaling,
    Tensorwise,
    clipped_share,
)


class FP8Linear(Linear):
    """Linear layer that takes the place of ``base`` and multiplies by its weight in 8 bits.

    Args:
        base: layer whose parameters, sharded or not, this layer takes over.
        product: scales and quantizes x, weight and gradients, and multiplies them.
    """

    def __init__(self, base: Linear, product: QuantizedProduct) -> None:
        take_over(self, base)
        self.product = product

    def multiply(self, x_BSI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return self.product(x_BSI, self.shard(self.weight), bias_O)


def apply_fp8(model: CausalLM, meshes: Meshes, config: Config) -> None:
    """Replace the linear layers that ``ParamSpec.fp8`` marks by ``FP8Linear``, if ``train.fp8`` is on.

    Call it after tensor parallelism: new layers keep the sharded weights of old ones. Raises
    ``BackendError`` for a GPU other than Hopper.
    """
    mode = config.train.fp8
    if mode == "off":
        return
    tp = meshes.group("tp")
    for name, linear in list(model.named_modules()):
        spec = find_spec(f"{name}.weight")
        if not isinstance(linear, Linear) or spec is None or not spec.fp8:
            continue
        # Ranks of tp use different rows or columns of the weight: shards, or some rows of a whole
        # one.
        differs = isinstance(linear.weight, DTensor) or linear.features is not None
        hook = None
        if (
            linear.features is not None and len(linear.features) == 1
        ):  # a delta net has three, none shared
            assert tp is not None
            hook = _sum_of_terms(linear.features[0], linear.weight.shape[0], tp)
        scaling = _scaling(config, E5M2, meshes, tp if differs else None)
        model.set_submodule(name, FP8Linear(linear, QuantizedProduct(scaling, hook)))


def fp8_experts(meshes: Meshes, config: Config) -> QuantizedExperts:
    """Return the expert backend of one layer that multiplies in 8 bits (``train.fp8``).

    Raises:
        BackendError: the GPU's compute capability is not 9.0 (Hopper).
    """
    etp = meshes.group("etp")
    # Gradients in e4m3 too: torch's grouped product knows no other format.
    up, down = (_scaling(config, E4M3, meshes, etp) for _ in range(2))
    return QuantizedExperts(up, down)


def _sum_of_terms(
    rows: slice, num_rows: int, group: dist.ProcessGroup
) -> Callable[[Tensor], Tensor]:
    """Return a function that sums the gradients of ``rows`` over the ranks that use the same rows.

    If there are more tp ranks than key and value heads, several ranks use one head's rows of a
    projection that has ``num_rows``, each for its own queries, and each has a term of the gradient.
    One rank without tp would round the sum of the terms to 8 bits, so it is summed before the
    rounding: the first of these ranks gets the sum and the others zeros, since gradients of
    replicated weights are summed over tp later.

    Args:
        rows: range of the projection's output features that this rank uses.
        num_rows: number of all output features.
        group: the tp ranks.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    shared_by = size * (rows.stop - rows.start) // num_rows  # consecutive ranks share a head

    def summed(grad: Tensor) -> Tensor:
        terms = grad.new_zeros(*grad.shape[:-1], num_rows)
        terms[..., rows] = grad
        dist.all_reduce(terms, group=group)
        return terms[..., rows] if rank % shared_by == 0 else torch.zeros_like(grad)

    return summed


def _scaling(
    config: Config, gradients: torch.dtype, meshes: Meshes, shards: dist.ProcessGroup | None
) -> Scaling:
    """Return the rule of ``train.fp8`` by which a layer's operands are scaled to 8 bits.

    Args:
        gradients: float8 dtype of gradients.
        shards: group of the ranks with other shards of the weight; None: the weight is whole.

    Raises:
        BackendError: the GPU's compute capability is not 9.0 (Hopper).
    """
    mode = config.train.fp8
    if meshes.default.device_type == "cuda":
        _check_gpu(torch.cuda.get_device_capability())
    if mode == "blockwise":
        return Blockwise()
    stage = meshes.stage_group()
    if mode == "delayed":
        return Delayed(gradients, _max_over(stage))
    return Tensorwise(gradients, _max_over(stage), _max_over(shards))


def _max_over(group: dist.ProcessGroup | None) -> AmaxReduce:
    return communicator(group).all_reduce_max


def _check_gpu(capability: tuple[int, int]) -> None:
    if capability != (9, 0):
        version = ".".join(map(str, capability))
        raise BackendError(
            f"train.fp8 needs a Hopper GPU (compute capability 9.0), whose 8-bit products it was written for, and this "
            f"one has {version}. Set train.fp8=off"
        )


@contextmanager
def weights_quantized_once(model_parts: Iterable[CausalLM], config: Config) -> Iterator[None]:
    """Within this context quantize each weight once to 8 bits and keep the result.

    No weight may change meanwhile. The 8-bit copies take a byte for each number of a weight, so
    they are kept only if weights stay unsharded for the whole step; else, and without
    ``train.fp8``, the context does nothing.
    """
    scalings = []
    if config.train.fp8 != "off" and gathers_once(config, config.mesh.pp):
        modules = (module for part in model_parts for module in part.modules())
        scalings = [module for module in modules if isinstance(module, Scaling)]
    try:
        for scaling in scalings:
            scaling.cached = {}
        yield
    finally:
        for scaling in scalings:
            scaling.cached = None


@torch.no_grad()
def update_scales(model_parts: Iterable[CausalLM], meshes: Meshes, stepped: bool) -> float:
    """Update the delayed fp8 scales with the largest values that the stage's ranks saw. Collective.

    Call this function once a step. The host waits for its result.

    Args:
        stepped: True if the step changed the weights. The largest values of a skipped step, which
            may be infinite, are discarded.

    Returns:
        Share of the stage's scales that values of this step exceeded (only this rank's values if
        the step is skipped); 0 without delayed scales.
    """
    delayed = [
        module for part in model_parts for module in part.modules() if isinstance(module, Delayed)
    ]
    if not delayed:
        return 0.0
    seen = torch.stack([scaling.seen for scaling in delayed])
    if stepped:  # every rank of a stage has the same modules in the same order
        seen = _max_over(meshes.stage_group())(seen)
    clipped = clipped_share(torch.stack([scaling.history for scaling in delayed]), seen)
    for scaling, largest in zip(delayed, seen, strict=True):
        scaling.seen.copy_(largest)
        scaling.end_step(stepped)
    # The same host sync tells the host which operands have a history by now.
    known = torch.stack([scaling.history for scaling in delayed]).amax(-1) > 0
    clipped, *flags = torch.cat((clipped.view(1), known.flatten())).cpu().tolist()
    for i, scaling in enumerate(delayed):
        scaling.known = [flag > 0 for flag in flags[3 * i : 3 * i + 3]]
    return clipped
