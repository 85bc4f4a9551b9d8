"""Mesh arithmetic without torch: axis sizes, parallel folding, rank groups, pipeline stages.

Plans, launchers and error messages need both meshes, for dense layers and for experts, before any
process group exists. ``automoe.parallel.mesh`` builds the DeviceMeshes from the same ``MeshShape``,
so both always agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import lcm, prod
from typing import Any

from automoe.config.layout import module_sizes
from automoe.config.schema import Config, MeshConfig
from automoe.errors import ConfigError

DEFAULT_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MOE_AXES = ("pp", "ep_replicate", "ep_shard", "ep", "etp")
# Tokens, or their keys and values, travel over these axes. Each has a communicator of its own even
# if it is the world: an all-to-all would else wait for the weights that FSDP gathers ahead.
DISPATCH_AXES = ("cp", "ep", "etp")
NEIGHBOUR = "neighbour"  # a group of two pipeline ranks (``Meshes.pipeline_neighbours``)
VIEWS = ("default", "moe")


@dataclass(frozen=True)
class MeshShape:
    """Axis sizes of two meshes of the same ranks, ``default`` (dense layers) and ``moe`` (experts).

    default: pp x dp_replicate x dp_shard x cp x tp. moe: pp x ep_replicate x ep_shard x ep x etp,
    with etp for expert tensor parallelism. Ranks of both are numbered row-major: the last axis
    varies fastest. ``pp`` is outermost in both, so the pipeline groups are the same.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep_replicate: int
    ep_shard: int
    ep: int
    etp: int

    @classmethod
    def of(cls, mesh: MeshConfig) -> MeshShape:
        """Make a shape from the axes of ``mesh``: 0 (unset) becomes 1; no axis may be -1."""
        return cls(**{field.name: getattr(mesh, field.name) or 1 for field in fields(cls)})

    @property
    def world_size(self) -> int:
        return prod(self.sizes("default"))

    @property
    def dp(self) -> int:
        """Number of ranks that read different rows of a batch: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks that FSDP shards non-expert parameters over: dp_shard x cp."""
        return self.dp_shard * self.cp

    def axes(self, view: str) -> tuple[str, ...]:
        return {"default": DEFAULT_AXES, "moe": MOE_AXES}[view]

    def sizes(self, view: str) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in self.axes(view))

    def active_axes(self, view: str) -> list[tuple[str, int]]:
        """Return (axis, size) of the axes larger than one, outermost first.

        Args:
            view: the mesh: 'default' or 'moe'.
        """
        return [
            (axis, size)
            for axis, size in zip(self.axes(view), self.sizes(view), strict=True)
            if size > 1
        ]

    def stride(self, view: str, axis: str) -> int:
        """Return the difference in rank number between neighbours on ``axis`` of mesh ``view``.

        Args:
            view: 'default' or 'moe'.
            axis: an axis of that mesh.
        """
        return prod(self.sizes(view)[self.axes(view).index(axis) + 1 :])

    def coordinates(self, rank: int, view: str) -> dict[str, int]:
        """Return the position of ``rank`` on every axis of ``view`` ('default' or 'moe')."""
        return {
            axis: rank // self.stride(view, axis) % getattr(self, axis) for axis in self.axes(view)
        }

    def groups(self, view: str, axis: str) -> list[list[int]]:
        """Return every group of ranks that differ only on ``axis`` of mesh ``view``, in rank order.

        Args:
            view: 'default' or 'moe'.
            axis: an axis of that mesh.
        """
        stride = self.stride(view, axis)
        size = getattr(self, axis)
        starts = [rank for rank in range(self.world_size) if rank // stride % size == 0]
        return [[start + i * stride for i in range(size)] for start in starts]

    def ep_per_node(self, gpus_per_node: int) -> int:
        """Return how many ranks an ep group has on each node of ``gpus_per_node`` ranks; 0 if it varies."""
        stride = self.stride("moe", "ep")
        block = stride * self.ep  # ranks of groups that lie between each other
        period = lcm(gpus_per_node, block)  # after which nodes cut groups as before
        ranks = range(self.world_size if self.world_size % period else period)
        members = Counter((rank // gpus_per_node, rank // block, rank % stride) for rank in ranks)
        counts = set(members.values())
        return counts.pop() if len(counts) == 1 else 0

    def process_groups(self) -> list[tuple[str, int]]:
        """Return (name, number of ranks) of each process group that a rank is in, the world first.

        Names are the axes larger than one (pp twice: both meshes have it), ``fsdp`` (dp_shard x
        cp) if cp > 1, and ``stage`` (a pipeline stage) if pp and two more axes of the default mesh
        are larger than one. An axis that spans the world is left out, since it uses the world's
        group, except cp, ep and etp.
        """
        named = self.active_axes("default") + self.active_axes("moe")
        named += [("fsdp", self.fsdp)] if self.cp > 1 and self.fsdp > 1 else []
        of_stage = [axis for axis, _ in self.active_axes("default") if axis != "pp"]
        if self.pp > 1 and len(of_stage) > 1:  # with one axis, that axis's group
            named.append(("stage", self.world_size // self.pp))
        axes = [axis for axis in named if axis[1] < self.world_size or axis[0] in DISPATCH_AXES]
        return [("world", self.world_size), *axes]

    def describe(self, view: str) -> str:
        """Return the axes larger than one, e.g. ``pp2 x dp_shard2``, or ``one rank``.

        Args:
            view: the mesh: 'default' or 'moe'.
        """
        return " x ".join(f"{axis}{size}" for axis, size in self.active_axes(view)) or "one rank"


ONE_RANK = MeshShape(*[1] * 9)


def resolve_mesh(mesh: MeshConfig, num_ranks: int | None) -> MeshShape:
    """Fill in axes that are 0 (by ``mesh.preset``) or -1; check that both meshes have the same ranks.

    In each pipeline stage, the axes of either mesh must have the same product.

    Args:
        mesh: axis sizes as configured; ``dp_shard`` and ``ep_shard`` may be -1.
        num_ranks: number of ranks of the run, from which ``dp_shard=-1`` follows; None takes it
            from ``ep_shard`` if that is set. Ignored when ``dp_shard`` is set.

    Raises:
        ConfigError: the preset is unknown, an axis is below one, the products differ, or nothing
            gives the number of ranks; the message names the nearest valid sizes.
    """
    chosen = preset_choice(mesh, num_ranks)
    mesh = expand_preset(mesh, num_ranks)
    for axis in dict.fromkeys(DEFAULT_AXES + MOE_AXES):
        size = getattr(mesh, axis)
        derived = axis in ("dp_shard", "ep_shard")
        if size < 1 and not (size == -1 and derived):
            remedy = f"Set mesh.{axis}=1 or more" + ", or -1 to fill the ranks" * derived
            raise ConfigError(f"mesh.{axis}", size, "an axis has at least 1 rank", remedy)
    moe_fixed = mesh.ep_replicate * mesh.ep * mesh.etp
    dp_shard = mesh.dp_shard
    if dp_shard == -1:
        dp_shard = _derive_dp_shard(mesh, num_ranks, moe_fixed, chosen)
    attention_ranks = mesh.dp_replicate * dp_shard * mesh.cp * mesh.tp
    ep_shard = mesh.ep_shard if mesh.ep_shard != -1 else attention_ranks // moe_fixed
    if ep_shard * moe_fixed != attention_ranks:
        raise _folding_error(mesh, dp_shard, attention_ranks, chosen)
    return MeshShape.of(replace(mesh, dp_shard=dp_shard, ep_shard=ep_shard))


def preset_choice(typed: MeshConfig, num_ranks: int | None) -> str:
    """Return e.g. `` (mesh.preset=fsdp_ep chose ep=8 for 8 ranks)``, to end an error message.

    It names the axes above 1 that the preset of ``typed``, the mesh as the user set it, chose; the
    text is empty if there are none.
    """
    axes = vars(expand_preset(typed, num_ranks)).items()
    chosen = ", ".join(f"{a}={n}" for a, n in axes if n not in ("", 1, getattr(typed, a)))
    return f" (mesh.preset={typed.preset} chose {chosen} for {num_ranks} ranks)" if chosen else ""


def _derive_dp_shard(mesh: MeshConfig, num_ranks: int | None, moe_fixed: int, chosen: str) -> int:
    unit = mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp
    if num_ranks is None and mesh.ep_shard != -1:
        num_ranks = mesh.pp * moe_fixed * mesh.ep_shard
    if num_ranks is None:
        raise ConfigError(
            "mesh.dp_shard",
            -1,
            "dp_shard=-1 is derived from the number of ranks, and neither launch.num_ranks nor mesh.ep_shard gives it",
            "Set launch.num_ranks or mesh.dp_shard",
        )
    dp_shard, rest = divmod(num_ranks, unit)
    if rest or dp_shard < 1:
        below = num_ranks // unit * unit
        above = (num_ranks // unit + 1) * unit
        nearest = f"{below} or {above}" if below else above
        # A preset would choose other axes for another number.
        ranks = "" if chosen else f"launch.num_ranks to {nearest}, or "
        raise ConfigError(
            "mesh.dp_shard",
            -1,
            f"{num_ranks} ranks do not divide by pp*dp_replicate*cp*tp = "
            f"{mesh.pp}*{mesh.dp_replicate}*{mesh.cp}*{mesh.tp} = {unit}{chosen}",
            f"Set {ranks}{_smaller_axes(mesh, num_ranks) or 'an axis'}",
        )
    return dp_shard


def _smaller_axes(mesh: MeshConfig, num_ranks: int) -> str:
    """Return settings by which ``num_ranks`` ranks fill the mesh, e.g. ``mesh.pp=1 or mesh.tp=2``.

    Each setting lowers one axis, as little as possible.
    """
    choices = []
    for axis in ("pp", "dp_replicate", "cp", "tp"):
        for size in range(getattr(mesh, axis) - 1, 0, -1):
            smaller = replace(mesh, preset="", **{axis: size})
            if num_ranks % (smaller.pp * smaller.dp_replicate * smaller.cp * smaller.tp):
                continue
            try:
                resolve_mesh(smaller, num_ranks)
            except ConfigError:  # the experts' axes do not fold into it
                continue
            choices.append(f"mesh.{axis}={size}")
            break
    return " or ".join(choices)


def _folding_error(
    mesh: MeshConfig, dp_shard: int, attention_ranks: int, chosen: str
) -> ConfigError:
    free = mesh.ep_replicate * mesh.etp
    divisors = [n for n in range(1, attention_ranks + 1) if attention_ranks % (n * free) == 0]
    nearest = sorted(sorted(divisors, key=lambda n: (abs(n - mesh.ep), n))[:3])
    shown = mesh.ep_shard if mesh.ep_shard != -1 else "ep_shard"
    remedy = (
        "Nearest valid choices: "
        + ", ".join(f"mesh.ep={n} mesh.ep_shard={attention_ranks // (n * free)}" for n in nearest)
        if nearest
        else f"Lower mesh.ep_replicate or mesh.etp: their product {free} does not divide {attention_ranks}"
    )
    return ConfigError(
        "mesh.ep",
        mesh.ep,
        "both meshes hold the same ranks: dp_replicate*dp_shard*cp*tp = "
        f"{mesh.dp_replicate}*{dp_shard}*{mesh.cp}*{mesh.tp} = {attention_ranks} must equal "
        f"ep_replicate*ep_shard*ep*etp = {mesh.ep_replicate}*{shown}*{mesh.ep}*{mesh.etp}{chosen}",
        remedy,
    )


def uses_ulysses(config: Config, mesh: MeshShape) -> bool:
    """Return True if attention exchanges positions for heads over cp.

    That is ``parallel.context=ulysses`` with cp > 1.
    """
    return config.parallel.context == "ulysses" and mesh.cp > 1


def exchanges_heads(config: Config, mesh: MeshShape) -> bool:
    """Return True if some layer exchanges positions for heads over cp.

    Attention does so with ``parallel.context=ulysses``, a gated delta net whatever that setting is.
    """
    linear = config.model.attention.linear_num_key_heads > 0 and mesh.cp > 1
    return linear or uses_ulysses(config, mesh)


def gathers_once(config: Config, pp: int) -> bool:
    """Return True if FSDP gathers weights once a step and frees them only at the step's end.

    Pipelines (``pp`` > 1) always do so; else ``parallel.reshard`` decides.
    """
    return pp > 1 or config.parallel.reshard == "step"


def stays_unsharded(config: Config, mesh: MeshShape) -> bool:
    """Return True if a single rank computes with its parameters as stored, without FSDP.

    FSDP would keep a second copy of each weight for compute, and copy each gradient in a reduction
    over one rank. One rank needs FSDP only for bfloat16 training: to cast float32 master weights,
    or to sum the bfloat16 gradients of several micro-batches in float32. LoRA does without: frozen
    parameters are stored in the compute dtype, and adapters cast their own float32 weights.
    """
    one_batch = config.train.global_batch_size == config.train.micro_batch_size
    narrow = config.optim.master_weights == "stochastic" and one_batch
    as_stored = config.train.dtype != "bfloat16" or narrow
    return mesh.world_size == 1 and (
        as_stored or (config.lora.rank > 0 and not config.train.trainable)
    )


def too_many_stages(num_stages: int, layers_together: int) -> tuple[str, str]:
    """Return (rule, remedy), the text of a ``ConfigError`` for more pipeline stages than layers.

    Args:
        num_stages: pipeline stages of all ranks.
        layers_together: number of consecutive layers that are not split.
    """
    return (
        f"every pipeline stage holds at least {layers_together} layer{'s' * (layers_together > 1)}, and "
        f"there are {num_stages} stages (mesh.pp * parallel.stages_per_rank)",
        f"Set model.num_layers to {num_stages * layers_together} or more, or lower mesh.pp or parallel.stages_per_rank",
    )


def split_layers(
    num_layers: int,
    num_stages: int,
    layers_per_stage: list[int] | None = None,
    layers_together: int = 1,
) -> list[range]:
    """Return the consecutive layers of every pipeline stage, first stage first.

    Args:
        num_layers: decoder layers in the whole model.
        num_stages: pp x stages_per_rank.
        layers_per_stage: explicit sizes; None splits as evenly as possible, with the longer stages
            first, because the last stage also holds the final norm and the head.
        layers_together: how many layers are not split (``ModelConfig.layers_together``).

    Raises:
        ConfigError: there are more stages than layers, and no explicit sizes.
    """
    if layers_per_stage is None and num_layers < num_stages * layers_together:
        raise ConfigError(
            "model.num_layers", num_layers, *too_many_stages(num_stages, layers_together)
        )
    if layers_per_stage is None:
        each, longer = divmod(num_layers // layers_together, num_stages)
        layers_per_stage = [
            layers_together * (each + (stage < longer)) for stage in range(num_stages)
        ]
    ends = list(accumulate(layers_per_stage))
    return [range(end - size, end) for end, size in zip(ends, layers_per_stage, strict=True)]


def stage_layers(config: Config, mesh: MeshShape) -> list[range]:
    """Return the layer numbers of every pipeline stage of ``config`` on ``mesh``, first stage first.

    Modules for multi-token prediction count as layers after the last one.
    """
    parallel = config.parallel
    model = config.model
    num_stages = mesh.pp * parallel.stages_per_rank
    stages = split_layers(
        model.num_layers, num_stages, parallel.layers_per_stage, model.layers_together
    )
    modules = module_sizes(config, num_stages)
    sizes = [len(stage) + more for stage, more in zip(stages, modules, strict=True)]
    return split_layers(len(model.all_layers), num_stages, sizes)


# Presets are named ways to fold attention and experts, scaled to the number of ranks: the
# strategies that arXiv 2504.14960 (table 2) compares. FSDP; FSDP with expert parallelism; tensor,
# expert and data parallelism; all five axes with the experts' mapping tied to attention's
# ("coupled"); all five with two independent mappings ("folded").

# Which axis takes the next factor of two as ranks double; what is left goes to dp_shard.
_ATTENTION_GROWTH = {
    "fsdp": (),
    "fsdp_ep": (),
    "tp_ep_dp": ("tp", "dp", "tp"),
    "coupled_5d": ("pp", "dp", "tp", "cp", "dp", "pp"),
    "folded_5d": ("pp", "tp", "dp", "cp", "dp", "pp"),
}
PRESETS = tuple(_ATTENTION_GROWTH)
MAX_EP = 8  # a node: beyond it tokens cross the slow network


def expand_preset(mesh: MeshConfig, num_ranks: int | None) -> MeshConfig:
    """Return ``mesh`` with its unset axes (0) set to the sizes of its preset, or to 1 without one.

    A preset lists some of pp, cp, tp and dp (data parallelism), an axis once or more. In this
    order each is doubled, which halves the number of ranks left, until that is odd or the list
    ends; dp gets the ranks left. ``ep`` is 1 for ``fsdp``, else the largest divisor, up to
    ``MAX_EP``, of the number of ranks over which experts may be sharded.

    Raises:
        ConfigError: the preset is unknown, or it is set and ``num_ranks`` is None.
    """
    unsaid: dict[str, Any] = {
        a: 1 for a, n in vars(mesh).items() if n == getattr(MeshConfig, a) == 0
    }
    if not mesh.preset:
        return replace(mesh, **unsaid)
    if mesh.preset not in PRESETS:
        raise ConfigError(
            "mesh.preset", mesh.preset, f"the presets are {', '.join(PRESETS)}", "Name one of them"
        )
    if num_ranks is None:
        raise ConfigError(
            "mesh.preset",
            mesh.preset,
            "a preset is scaled to the number of ranks",
            "Set launch.num_ranks",
        )
    sizes = dict.fromkeys(("pp", "dp", "cp", "tp"), 1)
    rest = num_ranks
    for axis in _ATTENTION_GROWTH[mesh.preset]:
        if rest % 2:
            break
        sizes[axis] *= 2
        rest //= 2
    data = sizes.pop("dp") * rest
    etp = ep = 1
    if mesh.preset in ("tp_ep_dp", "coupled_5d"):
        # Coupled: experts keep the tp of attention, and ep uses data-parallel ranks only.
        etp = sizes["tp"]
        ep = largest_divisor(data, MAX_EP)
    elif mesh.preset != "fsdp":
        ep = largest_divisor(data * sizes["cp"] * sizes["tp"], MAX_EP)
    sizes |= {"ep": ep, "etp": etp}
    return replace(mesh, preset="", **{a: sizes.get(a, 1) for a in unsaid})


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of ``number`` up to ``limit``."""
    return max(n for n in range(1, limit + 1) if number % n == 0)
