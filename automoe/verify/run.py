"""``python -m automoe.verify``: check that a configuration's mesh trains like one rank.

Example: ``python -m automoe.verify --config-name X mesh.ep=4``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import nan
from typing import TYPE_CHECKING

from automoe.config.compose import key_of, parse_arguments
from automoe.config.data_schema import DataConfig
from automoe.config.frozen import Device
from automoe.config.mesh_shape import MeshShape
from automoe.config.rule_engine import Row, check_rows
from automoe.config.rules_kernels import triton_is_interpreted
from automoe.config.schema import Config, MeshConfig, ParallelConfig, tokenizer_of
from automoe.config.tier import tier_of
from automoe.errors import BackendError, ConfigError, LaunchError, say
from automoe.launch.hardware import check_backends, missing_hardware, resolve_device, torch_lacks
from automoe.launch.prepare import check, check_here, compose
from automoe.model.params import count_params
from automoe.verify.pool import RankError, RankPool
from automoe.verify.proxy import list_cuts, make_proxy

if TYPE_CHECKING:  # these modules import torch, and checks of the configuration need no torch
    from automoe.comm.tokens import StepBatch
    from automoe.verify.trajectory import Trajectory

EXIT_DIFFERENT = 1
EXIT_FAILED = 3

MAX_RANKS = 8
MAX_PARAMETERS = 16_000_000  # every full tensor of both runs is kept in float64
MAX_TOKENS = 8192  # per step
MAX_SEQ_LEN = 1024

# Tolerances bound ||difference|| / ||reference|| of every tensor. In float64 runs differ only by
# the order of sums; bfloat16 has 8 bits, and its rounding depends on how a sum is split.
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 5e-2}
CLASS_TOLERANCE = 1e-6  # for classes of transformers that compute a part in float32
# 8-bit products, or dispatch in 8 bits, in a dtype below float64: rounding moves a code to its
# neighbour, an eighth away, and the next product moves more codes (docs/fp8.md). A mean over all
# tokens moves little. Rounding to bfloat16 moves more codes than rounding to float32.
FP8_TOLERANCE = 0.02
FP8_GRADIENTS = {"float64": 0.25, "float32": 0.25, "bfloat16": 0.5}
# Tolerance of gradients if the 128 tokens of a scale are not those of the reference: values far
# below the largest one then differ.
FP8_LINES = 1e-5
GRADIENTS = ("gradient", "gradient norm")
# These kinds are compared only if gradients must agree to 1e-10: Adam divides by the gradient's own
# size, so the rounding of a gradient that is almost zero becomes a whole learning rate.
AMPLIFIED = ("updated parameter",)

USAGE = """usage: automoe verify [--config-name NAME] [--proxy] [key=value ...]

Trains one step on one rank and one on the configured mesh, from the same
initial weights and the same rows of the configuration's own data, and compares
loss, balance losses, tokens per expert, gradient norm and every gradient: first
in float64 (and there the updated parameters too), with train.fp8 a second time
with its 8-bit products in float64, then in train.dtype with the routing of the
one-rank run repeated. Names the first difference.

Runs on the CPU, up to 8 ranks. A configuration too large for that is verified
by its proxy: every mesh axis cut to at most 2, widths and depth shrunk,
structure kept; the output lists what was cut.

launch.device=cuda takes a GPU a rank instead, over NCCL: in float64 and in
float32 with torch's operations, then with the configured kernels and dispatcher
in train.dtype.

  --config-name NAME   a primary configuration (default: config)
  --config-dir DIR     look for configurations here too
  --proxy              verify the proxy even if the configuration would fit
  --help               this text

Overrides are those of automoe train. Exit status: 0 equal, 1 different, 2 the
configuration is wrong, 3 a rank failed.
"""


def main(argv: list[str] | None = None) -> int:
    """Compare a training step on the configured mesh with one on one rank; return the exit status.

    The status is 0 if losses, norms, gradients and updated parameters are equal, 1 if some differ,
    3 if a rank failed.

    Args:
        argv: command line, with the configuration's name and overrides; None takes ``sys.argv``.

    Raises:
        AutomoeError: the configuration is wrong, or this machine lacks its GPUs or a package.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    force_proxy = "--proxy" in argv
    args = parse_arguments([word for word in argv if word != "--proxy"], ["--proxy"])
    if args.help:
        print(USAGE, end="")
        return 0
    if args.multirun:
        raise ConfigError("-m", True, "one configuration is verified at a time", "Leave -m out")
    config = compose(args)
    # Configurations for clusters name cuda; GPUs are taken only if the command line asks for them.
    asked = "launch.device" in map(key_of, args.overrides)
    device = resolve_device(config) if asked else "cpu"
    runnable, shape, cuts = make_runnable(config, force_proxy, device)

    from rich.console import Console

    from automoe.data.prepare import prepare_data
    from automoe.verify.view import name_of, show_result, show_start, show_verdict

    console = Console(highlight=False)
    show_start(console, runnable, shape, cuts)
    pool = RankPool(max_ranks=shape.world_size, device=device)
    try:
        prepare_data(runnable)
        results = []
        for config_pass in passes(runnable):
            # rich shows this status only on a terminal.
            with console.status(f"{name_of(config_pass)}: one rank, then the mesh"):
                results.append(verify_pass(config_pass, shape, pool))
            show_result(console, results[-1])
    except RankError as error:
        say(f"error: the step failed: {error}")
        return EXIT_FAILED
    finally:
        pool.close()
    show_verdict(console, results, shape)
    return EXIT_DIFFERENT if any(result.different for result in results) else 0


@dataclass(frozen=True)
class Comparison:
    """Comparison of one tensor or number of the mesh run with that of one rank.

    Attributes:
        kind: kind of quantity: ``loss``, ``gradient``, ``updated parameter``, ...
        name: name of the parameter or buffer; empty for a number of the whole model.
        step: optimizer step of the quantity, counted from 0.
        error: ||got - expected|| / ||expected||. It is infinite if one run lacks the tensor, if the
            shapes differ, or if ``expected`` is zero and ``got`` is not; 0 if both are zero.
        index: index of the element with the largest difference.
        got: value at ``index`` in the run under test.
        expected: value at ``index`` in the reference.
        absent: why the values cannot be compared; empty if they can.
    """

    kind: str
    name: str
    step: int
    error: float
    index: tuple[int, ...] = ()
    got: float = nan
    expected: float = nan
    absent: str = ""

    def within(self, tolerance: float) -> bool:
        """Return True if the error is at most ``tolerance``; False if it is NaN."""
        return self.error <= tolerance

    def __str__(self) -> str:
        subject = f"step {self.step} {self.kind}" + (f" of {self.name}" if self.name else "")
        if self.absent:
            return f"{subject}: {self.absent}"
        where = f" at {list(self.index)}" if self.index else ""
        return f"{subject}: relative error {self.error:.2e}; got {self.got!r}, expected {self.expected!r}{where}"


@dataclass(frozen=True)
class PassResult:
    """Comparison of the mesh with one rank under one configuration, for example in float64.

    Attributes:
        config: the configuration, one of those that ``passes`` returns.
        forced: True if the mesh repeated the routing of the one-rank run.
        tolerance: largest relative error that is accepted, except for gradients.
        gradient_tolerance: largest relative error that is accepted for gradients and their norm.
        compared: every number and tensor, in the order in which a step computes them.
    """

    config: Config
    forced: bool
    tolerance: float
    gradient_tolerance: float
    compared: list[Comparison]

    @property
    def different(self) -> list[Comparison]:
        """Comparisons beyond their tolerance; the first one is nearest to the cause."""
        return [c for c in self.compared if not self.equal(c)]

    def equal(self, comparison: Comparison) -> bool:
        return comparison.within(
            self.gradient_tolerance if comparison.kind in GRADIENTS else self.tolerance
        )


def make_runnable(
    config: Config, force_proxy: bool = False, device: Device = "cpu"
) -> tuple[Config, MeshShape, list[tuple[str, object, object]]]:
    """Return a variant of ``config`` whose mesh this machine can verify in a short time.

    The variant has random weights on ``device``; if the model or the mesh is too large, sizes are cut
    (``make_proxy``).

    Args:
        config: configuration to verify.
        force_proxy: cut sizes even if the configuration would fit.
        device: cpu, where several ranks share a core, or cuda, with one GPU per rank.

    Returns:
        The configuration to run, its mesh, and the changes as (key, configured value, value here),
        empty if the configuration runs unchanged.

    Raises:
        ConfigError: the configuration is invalid, or its results depend on the mesh by design.
        LaunchError: this machine has fewer GPUs than ranks.
        BackendError: a package that the configuration needs on GPUs is missing.
    """
    from automoe.data.tokenizer import BYTE_VOCAB_SIZE, load_tokenizer

    moe = config.moe
    # fmt: off
    rows: list[Row] = [  # settings whose results depend on the mesh by design
        ("moe.drop_scope", moe.capacity_factor > 0 and moe.drop_scope == "rank",
         "with a capacity, what a rank drops depends on which tokens it holds, so no two meshes are equal",
         "Set moe.drop_scope=sequence, or moe.capacity_factor=0, to verify"),
        ("moe.micro_batch_balance_coef", moe.micro_batch_balance_coef != 0,
         "this loss depends on how rows are grouped into micro-batches, and the reference has only one",
         "Set it to 0 to verify; moe.seq_balance_coef and moe.global_balance_coef may stay"),
    ]
    # fmt: on
    check_rows(config, rows)
    shape, _ = check_here(config)
    sized = replace(config, mesh=MeshConfig(**asdict(shape)))
    here = _without_checkpoint(sized, device)
    if device == "cpu":
        here = _in_plain_torch(here, triton_is_interpreted())
    if force_proxy or too_large(config, shape):
        # Synthetic ids fit any vocabulary.
        ids = BYTE_VOCAB_SIZE
        if not here.data.is_synthetic:
            ids = load_tokenizer(tokenizer_of(here)).vocab_size
        here, shape = make_proxy(here, shape, ids)
    if (
        not tier_of(here.model).resizable
        and (size := count_params(here.model).total) > MAX_PARAMETERS
    ):
        raise ConfigError(
            "model.hf_path",
            here.model.hf_path,
            f"{here.model.architecture} has {size:,} parameters, verification holds up to {MAX_PARAMETERS:,}, and a "
            "class of transformers has no proxy",
            "Name a folder with its config.json, with fewer layers and experts, and narrower",
        )
    assert check(here, None, device) == shape
    if why := torch_lacks(here, shape):
        raise BackendError(why)
    if device == "cuda":
        if missing := missing_hardware(shape, device):
            raise LaunchError(
                f"launch.device=cuda verifies with a GPU a rank: {missing}; torch {version('torch')} is installed. "
                "Choose a smaller mesh, or leave launch.device out to verify on the CPU"
            )
        check_backends(here, shape, device)
    cuts = [
        cut
        for cut in list_cuts(sized, here)
        if cut[0] not in ("launch.device", "checkpoint.export_hf")
    ]
    return here, shape, cuts


def _without_checkpoint(config: Config, device: Device) -> Config:
    """Return ``config`` on ``device`` with random weights, so that a run needs no checkpoint.

    The run exports none, and neither records nor replays routing. Preference pairs become plain
    conversations, whose cross-entropy can be compared.
    """
    # Verification compares the cross-entropy of rows, so conversations stand for preference pairs.
    if config.data.is_preference:
        config = replace(
            config,
            recipe="pretrain",
            recipe_args={},
            data=DataConfig(kind="stdlib_chat", on_long="truncate"),
        )
        config.data.chat.template = "plain"
    rope = replace(config.model.rope, extends=False)  # the scaling stays
    model = replace(config.model, hf_path=None, rope=rope)
    if not tier_of(config.model).resizable:
        model = replace(config.model, random_weights=True)
    return replace(
        config,
        model=model,
        checkpoint=replace(config.checkpoint, export_hf=False),
        lora=replace(
            config.lora, export="merged", base="weights"
        ),  # other values need a checkpoint
        moe=replace(config.moe, record_routing=None, replay_routing=None),
        launch=replace(config.launch, device=device),
    )


def _in_plain_torch(config: Config, keep_triton: bool) -> Config:
    """Return ``config`` with torch's operations, for any device and dtype, instead of kernels.

    Args:
        keep_triton: True to keep Triton's kernels, which need CUDA unless Triton is interpreted.
    """
    moe = replace(config.moe)
    kernels = replace(config.kernels, norm="torch")
    if moe.dispatcher == "deepep":  # alltoall sums the same rows
        moe.dispatcher = "alltoall"
    if moe.experts == "te" or (moe.experts == "triton" and not keep_triton):
        moe.experts = "grouped_mm"
    # On CUDA torch's flash kernel computes in half precision alone.
    if kernels.attention in ("cudnn", "flex", "te") or config.launch.device == "cuda":
        kernels.attention = "sdpa"
    if not keep_triton:
        kernels.rope = kernels.loss = "torch"
    parallel = replace(config.parallel)
    if parallel.context == "ring" and config.launch.device == "cuda":  # has no float64
        parallel.context = "gather"
    return replace(config, moe=moe, kernels=kernels, parallel=parallel)


def too_large(config: Config, shape: MeshShape) -> bool:
    """Return True if both verification runs would take a laptop's CPU more than a minute or two."""
    train = config.train
    return (
        shape.world_size > MAX_RANKS
        or train.seq_len > MAX_SEQ_LEN
        or train.seq_len * train.global_batch_size > MAX_TOKENS
        or count_params(config.model).total > MAX_PARAMETERS
    )


def passes(config: Config) -> list[Config]:
    """Return the configurations in which a mesh is compared with one rank, in order.

    The first is ``config`` in float64, without 8-bit matmuls, with torch's rotary embedding and
    loss (on CUDA with torch's operations for all kernels), and with ``moe.experts=loop`` if
    ``parallel.expert_wgrad=autograd``. On CUDA, if ``train.dtype`` is bfloat16, the same follows in
    float32. On a CPU, with ``train.fp8``, ``config`` follows with 8-bit matmuls and float64 elsewhere,
    so that rounding cannot change an 8-bit number. The last is ``config`` itself, unless its dtype is
    float64.

    A model that transformers computes has only the first. Two kinds of models have only those in
    float64: with sparse-attention indexers, as rounding would change the keys that they select,
    and with norms of small outputs (``model.post_norm_eps``), as these norms multiply the
    rounding.
    """
    on_cuda = config.launch.device == "cuda"
    plain = _in_plain_torch(config, keep_triton=False) if on_cuda else config
    in_float64 = replace(
        plain,
        train=replace(config.train, dtype="float64"),
        optim=replace(config.optim, master_weights="float32"),
        kernels=replace(plain.kernels, rope="torch", loss="torch"),  # no Triton kernel has float64
    )
    exact = replace(in_float64.train, fp8="off")
    # Products that accumulate into weight gradients exist only for grouped_mm.
    experts = "loop" if config.parallel.expert_wgrad == "autograd" else plain.moe.experts
    runs = [replace(in_float64, train=exact, moe=replace(plain.moe, experts=experts))]
    if not tier_of(config.model).repeats_routing:
        return runs
    # An indexer's choice cannot be repeated, and rounding changes it.
    rounds_far = config.model.attention.index_topk > 0 or config.model.post_norm_eps is not None
    if on_cuda and config.train.dtype == "bfloat16" and not rounds_far:
        runs.append(replace(runs[0], train=replace(exact, dtype="float32")))
    if config.train.fp8 != "off" and not on_cuda:
        runs.append(in_float64)
    if config.train.dtype != "float64" and not rounds_far:
        runs.append(config)
    return runs


def tolerances(config: Config, shape: MeshShape) -> tuple[float, float]:
    """Return (tolerance of everything but gradients, tolerance of gradients), as relative errors.

    Matmuls in 8 bits get larger ones, which docs/fp8.md explains.

    Args:
        config: one of the configurations that ``passes`` returns.
        shape: mesh that is compared with one rank.
    """
    dtype = config.train.dtype
    tolerance = TOLERANCES[dtype]
    if tier_of(config.model).computes_in_float32(config.model):
        return CLASS_TOLERANCE, CLASS_TOLERANCE
    if config.train.fp8 == "off" and (dtype == "float64" or config.moe.dispatch_dtype == "auto"):
        return tolerance, tolerance
    if dtype != "float64":
        return max(FP8_TOLERANCE, tolerance), FP8_GRADIENTS[dtype]
    # With cp and MLA, ranks compute keys and values from the same latents, each for its own
    # queries, and each rank rounds its own term of the latents' gradient.
    if shape.cp > 1 and config.model.attention.kind == "mla":
        return tolerance, FP8_GRADIENTS[dtype]
    return tolerance, FP8_LINES if config.train.fp8 == "blockwise" else tolerance


def verify_pass(
    config: Config, shape: MeshShape, pool: RankPool, run: Callable[..., Trajectory] | None = None
) -> PassResult:
    """Run one step on one rank and one on ``shape``, and compare them.

    Args:
        config: one of the configurations that ``passes`` returns; its dtype decides on the tolerance,
            and on whether the mesh repeats the expert choices of the one rank.
        pool: ranks that run both steps.
        run: function of each rank of the mesh, with the signature of ``run_trajectory``; default:
            ``run_trajectory``.

    Raises:
        RankError: a rank failed.
    """
    train = config.train
    forced = train.dtype != "float64" and config.model.num_moe_layers > 0
    # The reference has one micro-batch of all rows. With fp8 a scale depends on its micro-batch, so
    # the reference has as many micro-batches as the mesh, with the same rows in each.
    num_rows = train.global_batch_size if train.fp8 == "off" else shape.dp * train.micro_batch_size
    mesh = MeshConfig(dp_shard=1, ep_shard=1)
    one_rank = replace(
        config,
        mesh=mesh,
        parallel=ParallelConfig(),
        train=replace(train, micro_batch_size=num_rows),
    )
    # Ranks compare: this process never imports torch, nor holds tensors.
    pool.start(shape.world_size)  # rank 0 keeps its reference from the first call to the second
    [routing] = pool.run(
        "automoe.verify.compare:run_reference",
        1,
        one_rank,
        MeshShape.of(mesh),
        shape.dp,
        forced,
        pool.device,
    )
    compared = pool.run(
        "automoe.verify.compare:run_compared",
        shape.world_size,
        run,
        config,
        shape,
        routing,
        pool.device,
    )[0]
    within, for_gradients = tolerances(config, shape)
    if for_gradients > TOLERANCES["float64"]:
        compared = [c for c in compared if c.kind not in AMPLIFIED]
    return PassResult(config, forced, within, for_gradients, compared)


def loader_rows(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Return the rows that data-parallel rank ``dp_rank`` of ``dp_size`` reads in the first step.

    Args:
        step: must be 0.
    """
    from automoe.data.loader import Loader

    assert step == 0
    return Loader(config, dp_rank, dp_size).next_step()
