"""What the calls of a layer do beside computing: the only place that decides it.

Modules are built with the result and keep it. Collectives of tp, ep and cp are inside of all that
is wrapped here, since the modules call them. FSDP's hooks are outside: they surround the forward
of a module, and modules call what is wrapped in their forward. So weights are unsharded whenever
a call runs again.
"""

from __future__ import annotations

from functools import partial, reduce

from automoe.config.recompute import DISCARDED_OUTPUTS, FULL, recomputed_modules
from automoe.config.schema import Config, is_linear
from automoe.moe.calls import UNWRAPPED, Call, LayerCalls, Wrap, as_it_is
from automoe.moe.discard_outputs import discard_outputs, discard_scope
from automoe.moe.gradient_sums import GradientSums
from automoe.moe.grouped_mm import grouped_mm_experts
from automoe.optim.qk_clip import WatchedAttention
from automoe.parallel.activation_checkpoint import Recomputed
from automoe.parallel.compile import compiled
from automoe.parallel.overlap import TURNS


def layer_calls(config: Config, layer: int) -> LayerCalls:
    """Return what the calls of layer number ``layer`` are wrapped in."""
    modules = recomputed_modules(config.parallel, layer)

    def if_named(name: str, wrap: Wrap) -> Wrap:
        return wrap if name in modules else as_it_is

    # A recomputed call runs compiled code again, but core_attn is inside of a compiled part and the
    # compiler recomputes it. Experts are an FSDP unit of their own, so they run again to the end.
    fixed = compiled if config.train.compile else as_it_is
    softmax = not is_linear(config.model.attention, layer)
    watched = WatchedAttention if config.optim.qk_clip and softmax else as_it_is
    scope = discard_scope if modules.intersection(DISCARDED_OUTPUTS) else as_it_is
    experts = UNWRAPPED.experts
    if (how := config.parallel.expert_wgrad) != "autograd":
        later = TURNS.defer if how == "delayed" else None
        experts = lambda module, _: partial(  # noqa: E731
            grouped_mm_experts, sums=GradientSums(module, later)
        )
    return LayerCalls(
        layer=chain(if_named(FULL, partial(Recomputed, to_end=True, saves=True)), scope),
        mix=fixed,
        norm=if_named("layernorm", discard_outputs),
        gather=if_named("layernorm", discard_outputs),
        project_up=if_named("mla_up_proj", discard_outputs),
        attend=chain(if_named("core_attn", Recomputed), watched),
        mlp=chain(fixed, if_named("mlp", Recomputed)),
        shared_experts=chain(fixed, if_named("shared_experts", Recomputed)),
        router=fixed,
        run_experts=if_named("moe", partial(Recomputed, to_end=True)),
        experts=experts,
        # Autograd runs a region again on the stream of the node that needs it first, and nodes on
        # another stream would not wait for it: no shared experts there that read recomputed tensors
        side_stream=not modules & {FULL, "layernorm"},
    )


def chain(*wraps: Wrap) -> Wrap:
    """Return the wrapper that applies ``wraps``, the innermost first."""

    def wrapped(call: Call) -> Call:
        return reduce(lambda inner, wrap: wrap(inner), wraps, call)

    return wrapped
