"""What the trainer asks about a model that its class of ``transformers`` computes.

torch is imported where an answer needs it: some are given before ranks start.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from automoe.config.mesh_shape import MeshShape
from automoe.config.rules import Row
from automoe.config.rules_model import sharded_expert_rows
from automoe.config.schema import Config, ModelConfig, MoEConfig
from automoe.config.tier import Tier
from automoe.model.adapters import is_target
from automoe.model.params import Param

if TYPE_CHECKING:
    from automoe.model.backend import BackendConfig
    from automoe.model.causal_lm import CausalLM

# Settings that automoe's decoder computes.
_DECODER_ALONE = """
    moe.gate moe.dispatch_dtype moe.router_jitter moe.router_dtype moe.capacity_factor moe.record_routing
    moe.replay_routing train.fp8 train.compile kernels.attention kernels.rope kernels.loss kernels.norm lora.base
    optim.algorithm optim.master_weights optim.qk_clip model.rope.extends
""".split()


class ClassTier(Tier):
    """The tier of every class of ``transformers``."""

    fixed = True
    repeats_routing = False

    # fmt: off
    def rows(self, config: Config, shape: MeshShape) -> Iterator[Row]:
        model = config.model
        yield ("model.hf_path", model.hf_path is None, "model.family=transformers takes the class from a config.json",
               "Set model.hf_path to a folder with one")
        tier = (f"{model.architecture} has no native family: its class of transformers computes it, with ep, ep_shard, "
                "dp_shard and their replicas; native families (docs/huggingface.md) have every axis and kernel")
        for axis in ("pp", "cp", "tp", "etp"):
            yield f"mesh.{axis}", getattr(shape, axis) > 1, tier, f"Set mesh.{axis}=1"
        plain = Config()
        for key in _DECODER_ALONE:
            value = attrgetter(key)(plain)
            yield key, attrgetter(key)(config) != value, tier, f"Set {key}={str(value).lower()}"
        yield "moe.experts", config.moe.experts not in ("grouped_mm", "loop", "triton"), tier, "Set moe.experts=grouped_mm"
        recompute = config.parallel.recompute
        yield "parallel.recompute", recompute not in ([], "full"), tier, "Set parallel.recompute=full, or []"
        if model.num_moe_layers:
            yield from sharded_expert_rows(model, shape)
            yield ("parallel.expert_wgrad", config.parallel.expert_wgrad != "autograd",
                   "the experts of a class of transformers use its own products (model.family=transformers)",
                   "Set parallel.expert_wgrad=autograd")

    def adapter_rows(self, config: Config, params: list[Param]) -> Iterator[Row]:
        from automoe.classes.params import uncalled_layers  # torch

        architecture = config.model.architecture
        if "experts" in config.lora.targets:
            left = [param.name for param in params if _is_unknown_stack(param)]
            yield ("lora.targets", bool(left), f"{architecture} has experts {', '.join(left[:2])}; adapters "
                   "are only for stacks gate_up_proj and down_proj [experts, outputs, inputs]",
                   "Set lora.targets=[attention,mlp,shared_experts]")
        unused = uncalled_layers(str(config.model.hf_path))
        asked = {param.name: param.spec.lora for param in params if is_target(param, config.lora)}
        odd = [name for name in asked if name in unused]
        others = sorted({str(last) for name, last in asked.items() if name not in unused})
        yield ("lora.targets", bool(odd), f"{architecture} reads {', '.join(odd[:2])} and does not call the "
               "layer, so an adapter adds nothing", f"Set lora.targets=[{','.join(others)}]")
    # fmt: on

    def check(self, config: Config) -> None:
        from automoe.parallel.parallelize import build_decoder, parameter_dtype  # torch

        build_decoder(config.model, config.moe, parameter_dtype(config))

    def params(self, model: ModelConfig, buffers: bool) -> list[Param]:
        from automoe.classes.params import class_params  # torch

        table = class_params(str(model.hf_path))
        return [param for param in table if buffers or param.spec.kind != "buffer"]

    def build(self, model: ModelConfig, moe: MoEConfig, backend: BackendConfig | None) -> CausalLM:
        from automoe.classes.model import TransformersModel  # torch

        return TransformersModel(model, moe, backend)

    def expert_style(self) -> Any:
        from automoe.classes.expert_parallel import ExpertParallel  # torch

        return ExpertParallel

    def layer_bytes(self, config: Config, ep: int, expert_rows: float) -> Any:
        from automoe.classes.activations import class_layers  # torch

        return class_layers(config, ep, expert_rows)

    def computes_in_float32(self, model: ModelConfig) -> bool:
        from automoe.classes.model import computes_in_float32  # torch

        return computes_in_float32(model)


def _is_unknown_stack(param: Param) -> bool:
    """Return whether ``param`` holds experts and gets no adapter."""
    stacked = len(param.shape) == 3 or "expert" in param.name
    in_ffn = param.part in ("routed_experts", "dense_ffn") and param.multiplies
    return stacked and in_ffn and param.spec.lora is None
