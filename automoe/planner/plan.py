"""The plan of one run: parameters, bytes, tokens, FLOPs, time and warnings. No torch, no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from automoe.config.batch import BatchPlan, plan_batch
from automoe.config.mesh_shape import MeshShape
from automoe.config.pipeline import rank_of_stage
from automoe.config.schema import ClusterConfig, Config
from automoe.model.params import ParamCount, count_params
from automoe.observe.flops import TokenFlops, step_flops_per_token
from automoe.planner.activations import UNEVEN, at_load, most_load
from automoe.planner.checkpoint import CheckpointCost, checkpoint_cost
from automoe.planner.machine import Machine
from automoe.planner.memory import plan_memory
from automoe.planner.place import busiest
from automoe.planner.remedies import Remedy, gib, remedies
from automoe.planner.reserve import Reserve, needed, not_modelled, reserve
from automoe.planner.step_memory import RankMemory
from automoe.planner.time import StepTime, step_time

SHOWN = 5  # number of single changes that a warning lists
# Multiple of the even expert load up to which memory should last; below it the plan warns.
ROOM = 2.5
# Fields of ``Plan`` that have other names in JSON.
_IN_JSON = {
    "flops": "flops_per_token",
    "ranks": "bytes_per_rank",
    "uneven_needed": "needed_at_twice_the_even_load",
    "full_at": "full_at_times_the_even_load",
}
SLOW = 0.1  # Share of a step, or of a rank's work, above which the plan warns.


@dataclass(frozen=True)
class Plan:
    """Result of ``automoe plan``, in bytes, FLOPs and seconds.

    Attributes:
        mesh, params, batch, flops: resolved mesh, parameter counts, sizes of a step, FLOPs per
            token.
        ranks: peak memory of each pipeline rank at even expert load; ``uneven_ranks``: with twice
            the mean number of tokens on its experts.
        reserve: memory to leave free on the heaviest rank.
        needed, uneven_needed: largest peak with reserve of ``ranks``, and of ``uneven_ranks``.
        full_at: multiple of the even expert load, above 1, at which memory is full; None: no
            possible load fills it, the even load exceeds it already, or the cluster's memory is
            unknown.
        not_modelled, warnings: sentences for the user, on settings whose cost is left out, and on
            what is slow or too large.
        time, checkpoint: predicted step, and cost of checkpoints.
        num_nodes: nodes of the run.
        single_changes, combination: if the run does not fit, changes that each save memory, fastest
            first, and the fastest combination that fits (None: none does).
    """

    mesh: MeshShape
    params: ParamCount
    batch: BatchPlan
    flops: TokenFlops
    ranks: list[RankMemory]
    uneven_ranks: list[RankMemory]
    reserve: Reserve  # memory to leave free on the heaviest rank, besides its peak
    needed: float  # largest sum of peak and reserve of any rank
    uneven_needed: float  # ``needed`` at twice the even expert load
    # Multiple of the even expert load at which memory is full; None: no possible load fills it.
    full_at: float | None
    not_modelled: list[str]
    time: StepTime
    checkpoint: CheckpointCost
    num_nodes: int
    warnings: list[str]
    # Changes that help a run that does not fit in memory, one by one.
    single_changes: list[Remedy] = field(default_factory=list)
    combination: Remedy | None = None  # fastest combination of changes that fits; None if none does

    @property
    def heaviest(self) -> RankMemory:
        """Rank that needs the most memory; of equal ranks the first."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def bubble(self) -> float:
        """Share of a step that the busiest pipeline rank waits for other ranks."""
        return self.time.bubble / self.time.seconds

    @property
    def uneven_peak(self) -> float:
        """Peak bytes of the rank that needs most memory at twice the even expert load."""
        return max(rank.peak for rank in self.uneven_ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields except ``uneven_ranks`` as plain data for JSON.

        Four are renamed: ``flops`` to ``flops_per_token``, ``ranks`` to ``bytes_per_rank``,
        ``uneven_needed`` to ``needed_at_twice_the_even_load``, and ``full_at`` to
        ``full_at_times_the_even_load``. ``num_nodes`` is in ``mesh``. Numbers that follow from the
        fields are added, such as each rank's ``peak``, ``flops_per_step`` and ``bubble``.
        """
        facts = asdict(self)
        del facts["uneven_ranks"]
        for rank, planned in zip(facts["ranks"], self.ranks, strict=True):
            rank["peak"] = planned.peak
        facts["mesh"] |= {"world_size": self.mesh.world_size, "num_nodes": facts.pop("num_nodes")}
        facts["checkpoint"]["blocked_share"] = self.checkpoint.blocked_share
        facts |= {
            "time": self.time.to_dict(),
            "flops_per_step": self.flops.causal * self.batch.tokens_per_step,
            "bubble": self.bubble,
            "heaviest_pp_rank": self.heaviest.pp_rank,
            "peak_at_twice_the_even_load": self.uneven_peak,
        }
        return {_IN_JSON.get(name, name): fact for name, fact in facts.items()}


def make_plan(config: Config, mesh: MeshShape) -> Plan:
    """Return the predicted memory, time and costs of a valid ``config`` on its resolved ``mesh``."""
    batch = plan_batch(config, mesh)
    time = step_time(config, mesh, batch)
    ranks = plan_memory(config, mesh, batch)
    uneven = plan_memory(config, mesh, at_load(batch, UNEVEN, config, mesh))
    plan = Plan(
        mesh=mesh,
        params=count_params(config.model),
        batch=batch,
        flops=step_flops_per_token(config),
        ranks=ranks,
        uneven_ranks=uneven,
        reserve=reserve(config, mesh, max(ranks, key=lambda rank: rank.peak)),
        needed=needed(config, mesh, ranks),
        uneven_needed=needed(config, mesh, uneven),
        full_at=full_load(config, mesh, batch),
        not_modelled=list(not_modelled(config, mesh, batch)),
        time=time,
        checkpoint=checkpoint_cost(config, mesh, time.seconds),
        num_nodes=-(-mesh.world_size // config.cluster.gpus_per_node),
        warnings=[],
    )
    if config.cluster.memory_bytes and plan.uneven_needed > config.cluster.memory_bytes:
        singles, combination = remedies(config, mesh, time.tokens_per_second)
        plan = replace(plan, single_changes=singles, combination=combination)
    return replace(plan, warnings=[*_memory_warnings(config, plan), *_warnings(config, plan)])


def predict(config: Config, shape: MeshShape) -> dict[str, float | None]:
    """Predict the results of a run that a sweep shows beside its measurements.

    Returns:
        ``tokens_per_second`` of all ranks; ``mfu``; ``memory``, peak bytes of the heaviest rank at
        even expert load, without reserve; and ``balance``, (token, expert) pairs of the busiest
        rank divided by the mean of ranks, None without MoE layers.
    """
    plan = make_plan(config, shape)
    routed = config.model.num_moe_layers
    balance = busiest(config, shape, Machine.of(config)) if routed else None
    speed = plan.time.tokens_per_second
    memory = plan.heaviest.peak
    return {"tokens_per_second": speed, "mfu": plan.time.mfu, "memory": memory, "balance": balance}


def full_load(config: Config, mesh: MeshShape, batch: BatchPlan) -> float | None:
    """Return the multiple of the mean expert load at which a rank's memory is full.

    The reserve for CUDA context, communicators and fragmentation is included. The result is None if
    the cluster's memory is unknown, is full at the mean load already, or suffices for the largest
    possible load.

    Args:
        batch: sizes of a step at the mean load.
    """

    def need(load: float) -> float:
        return needed(config, mesh, plan_memory(config, mesh, at_load(batch, load, config, mesh)))

    limit = config.cluster.memory_bytes
    low = 1.0
    high = most_load(config, mesh)
    fits = need(low)
    over = need(high)
    if not fits <= limit < over:
        return None
    for _ in range(8):  # Bytes grow almost linearly with the load: two or three rounds suffice.
        middle = low + (high - low) * (limit - fits) / (over - fits)
        if abs((now := need(middle)) - limit) < 1e-4 * limit:
            break
        if now <= limit:
            low, fits = middle, now
        else:
            high, over = middle, now
    return middle


def _memory_warnings(config: Config, plan: Plan) -> Iterator[str]:
    limit = config.cluster.memory_bytes
    need = plan.needed
    peak = plan.heaviest.peak
    where = f"pp rank {plan.heaviest.pp_rank}" if plan.mesh.pp > 1 else "every rank"
    if not limit or plan.uneven_needed <= limit:
        if plan.full_at is not None and plan.full_at < ROOM:
            yield (
                f"buffers of the experts are full if a rank gets {plan.full_at:.1f} times its even share of tokens, "
                "which routers that have learnt little may send. Lower train.micro_batch_size, or bound it with "
                "moe.capacity_factor"
            )
        return
    if need <= limit:
        need = plan.uneven_needed
        peak = plan.uneven_peak
        where = "a rank whose experts get twice their even share of tokens"
    verdict = "does not fit" if peak > limit else "leaves too little for the reserve"
    had = f"the {gib(limit)} that {config.cluster.name} has"
    text = [f"{where} needs {gib(need)}, the reserve included, of {had}: {verdict}"]
    if plan.combination:
        text.append(f"the cheapest combination that fits is {plan.combination}")
    else:
        text.append(
            "no combination of changes on these ranks fits; look for another mesh with search=true world=N"
        )
    if plan.single_changes:
        # List first the changes that fit. The sort is stable, so both groups stay ordered by speed.
        shown = sorted(plan.single_changes, key=lambda change: change.needed > limit)[:SHOWN]
        text.append(f"single changes that need less: {'; '.join(map(str, shown))}")
    text.append("All this is with experts at twice their even share")
    first, *others = text
    yield ". ".join([first, *(part[0].upper() + part[1:] for part in others)])


def missing_speeds(cluster: ClusterConfig, world_size: int) -> list[str]:
    """Return the cluster keys of a GPU's speeds that are unset, such as ``peak_flops``; [] for a CPU.

    Without them the planner assumes a CPU's speeds, and predicted times are far too long. With a
    ``world_size`` of one rank, no bandwidth between GPUs is needed.
    """
    keys = ["peak_flops", "memory_bandwidth", *["intra_node_bandwidth"] * (world_size > 1)]
    return [key for key in keys if not cluster.on_cpu and not getattr(cluster, key)]


def _warnings(config: Config, plan: Plan) -> Iterator[str]:
    """Yield sentences on what makes the planned step slow, each with its numbers and a remedy."""
    mesh, batch, time = plan.mesh, plan.batch, plan.time
    step = time.seconds
    if unknown := missing_speeds(config.cluster, mesh.world_size):
        yield (
            f"cluster {config.cluster.name} has no {', '.join(unknown)}, and a CPU's speeds are used: the times mean "
            "nothing. Set them in its file"
        )
    if plan.bubble > 0.25:
        yield (
            f"the pipeline idles {plan.bubble:.0%} of a step: {batch.num_micro_batches} micro-batches over "
            f"mesh.pp={mesh.pp} ranks. Raise train.global_batch_size or parallel.stages_per_rank"
        )
    if config.cluster.peak_flops and config.model.num_moe_layers and batch.rows_per_expert < 64:
        yield (
            f"an expert sees {batch.rows_per_expert:.0f} rows a micro-batch, too few to keep a GPU busy. "
            "Raise train.micro_batch_size or mesh.ep"
        )
    seen = time.communication.get("ep", 0.0)
    away = time.off_node.get("ep", 0.0)
    if away and seen > SLOW * step:
        once = ", or send one copy a node with moe.dispatcher=hierarchical"
        if config.moe.dispatcher in ("hierarchical", "deepep"):
            once = ""
        yield (
            f"experts' tokens leave the node: {gib(away)} a rank and step, and ep takes {seen / step:.0%} of the step. "
            f"Keep mesh.ep * mesh.etp within the {config.cluster.gpus_per_node} GPUs of a node{once}"
        )
    usual, most = median(time.by_rank), max(time.by_rank)
    a_layer = usual * mesh.pp / config.model.num_layers
    # A difference below one layer's time cannot be reduced by moving a layer.
    if most > usual + max(SLOW * usual, a_layer):
        rank = time.by_rank.index(most)
        last = mesh.pp * config.parallel.stages_per_rank - 1
        has_head = rank == rank_of_stage(last, mesh.pp, config.parallel.schedule)
        stages = "has the head" if has_head else "has more than the others"
        yield (
            f"pp rank {rank}, which {stages}, is busy {most / usual - 1:.0%} longer than the usual rank, and all wait "
            "for it. Give it fewer layers with parallel.layers_per_stage"
        )
    interval, write = plan.checkpoint.interval_seconds, plan.checkpoint.write_seconds
    if interval and write > interval:
        yield (
            f"a checkpoint takes {write:,.0f} s to write and is saved every {interval:,.0f} s. Raise "
            "checkpoint.every or checkpoint.every_minutes"
        )
