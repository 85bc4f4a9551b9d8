"""One run on paper: parameters, bytes, tokens, FLOPs, and what will not work. No torch, no GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from automoe.config.mesh_shape import MeshShape, largest_divisor
from automoe.config.recompute import FULL, recomputed_names
from automoe.config.schema import Config
from automoe.cost.activations import BatchPlan, at_load, plan_batch
from automoe.cost.adapters import step_flops_per_token
from automoe.cost.checkpoint import CheckpointCost, checkpoint_cost
from automoe.cost.memory import RankMemory, plan_memory
from automoe.cost.params import ParamCount, TokenFlops, count_params
from automoe.cost.time import StepTime, step_time

TIGHT = 0.92  # share of a GPU's memory above which fragmentation and NCCL buffers may not fit
UNEVEN = 2.0  # times the even load of experts: where routers start, and at times stay


@dataclass(frozen=True)
class Plan:
    """What ``automoe plan`` prints. Bytes and FLOPs; ``ranks`` has one entry per pp rank.

    ``uneven_ranks`` are the same where experts of a rank get twice their even share of tokens (``at_load``).
    """

    mesh: MeshShape
    params: ParamCount
    batch: BatchPlan
    flops: TokenFlops
    ranks: list[RankMemory]
    uneven_ranks: list[RankMemory]
    time: StepTime
    checkpoint: CheckpointCost
    num_nodes: int
    warnings: list[str]

    @property
    def heaviest(self) -> RankMemory:
        """The rank that needs the most memory; of equal ones the first."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def bubble(self) -> float:
        """Share of a step that the busiest pipeline rank waits for others."""
        return self.time.bubble / self.time.seconds

    @property
    def uneven_peak(self) -> float:
        """What the rank that then needs the most memory does, where experts get twice their even share."""
        return max(rank.peak for rank in self.uneven_ranks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; every pp rank with its peaks."""
        ranks = [{**asdict(rank), "peak": rank.peak} for rank in self.ranks]
        return {
            "mesh": {**asdict(self.mesh), "world_size": self.mesh.world_size, "num_nodes": self.num_nodes},
            "params": asdict(self.params),
            "batch": asdict(self.batch),
            "flops_per_token": asdict(self.flops),
            "flops_per_step": self.flops.causal * self.batch.tokens_per_step,
            "bubble": self.bubble,
            "time": self.time.to_dict(),
            "checkpoint": asdict(self.checkpoint) | {"blocked_share": self.checkpoint.blocked_share},
            "heaviest_pp_rank": self.heaviest.pp_rank,
            "bytes_per_rank": ranks,
            "peak_at_twice_the_even_load": self.uneven_peak,
            "warnings": self.warnings,
        }


def make_plan(config: Config, mesh: MeshShape) -> Plan:
    """Plan a validated configuration on its resolved mesh."""
    batch = plan_batch(config, mesh)
    time = step_time(config, mesh, batch)
    plan = Plan(
        mesh=mesh,
        params=count_params(config.model),
        batch=batch,
        flops=step_flops_per_token(config),
        ranks=plan_memory(config, mesh, batch),
        uneven_ranks=plan_memory(config, mesh, at_load(batch, UNEVEN, config, mesh)),
        time=time,
        checkpoint=checkpoint_cost(config, mesh, time.seconds),
        num_nodes=-(-mesh.world_size // config.cluster.gpus_per_node),
        warnings=[],
    )
    return replace(plan, warnings=[*_memory_warnings(config, plan), *_speed_warnings(config, plan)])


def _memory_warnings(config: Config, plan: Plan) -> list[str]:
    limit, need, load = config.cluster.memory_bytes, plan.heaviest.peak, 1.0
    where = f"pp rank {plan.heaviest.pp_rank}" if plan.mesh.pp > 1 else "every rank"
    if limit and need <= TIGHT * limit < limit < plan.uneven_peak:
        need, load, where = plan.uneven_peak, UNEVEN, "a rank whose experts get twice their even share of tokens"
    if not limit or need <= TIGHT * limit:
        return []
    verdict = "does not fit" if need > limit else "leaves little for fragmentation and communication buffers"
    text = f"{where} needs {gib(need)} of the {gib(limit)} that {config.cluster.name} has: {verdict}."
    remedies = [f"{change} ({gib(peak)})" for change, peak in _alternatives(config, plan, load) if peak < need]
    return [f"{text} Single changes that need less: {'; '.join(remedies)}" if remedies else text]


def _alternatives(config: Config, plan: Plan, load: float) -> list[tuple[str, float]]:
    """Single changes that lower memory on the same ranks, with the peak that each leads to at so much the even load."""
    mesh, parallel, train = plan.mesh, config.parallel, config.train
    changes: list[tuple[str, Config, MeshShape]] = []
    if mesh.pp == 1 and "step" in (parallel.reshard, parallel.grad_sync):
        freed = replace(config, parallel=replace(parallel, reshard="micro_batch", grad_sync="micro_batch"))
        changes.append(("parallel.reshard=micro_batch parallel.grad_sync=micro_batch", freed, mesh))
    if train.micro_batch_size > 1 and train.global_batch_size % mesh.dp == 0:
        rows = largest_divisor(train.micro_batch_size, train.micro_batch_size - 1)
        smaller = replace(config, train=replace(train, micro_batch_size=rows))
        changes.append((f"train.micro_batch_size={rows}", smaller, mesh))
    if FULL not in (names := recomputed_names(parallel)):
        more = [*(name for name in names if name != "moe_act"), "moe"]  # which runs the activation again, too
        for again in (more, [FULL]) if config.model.num_moe_layers and "moe" not in names else ([FULL],):
            text = again[0] if len(again) == 1 else f"[{','.join(again)}]"
            changed = replace(config, parallel=replace(parallel, recompute=again))
            changes.append((f"parallel.recompute={text}", changed, mesh))
    if mesh.dp_shard % 2 == 0 and train.seq_len % (4 * mesh.cp) == 0 and parallel.context == "gather":
        split = replace(mesh, dp_shard=mesh.dp_shard // 2, cp=2 * mesh.cp)
        changes.append((f"mesh.dp_shard={split.dp_shard} mesh.cp={split.cp}", config, split))
    if mesh.ep_shard % 2 == 0 and config.model.num_experts % (2 * mesh.ep) == 0:
        folded = replace(mesh, ep_shard=mesh.ep_shard // 2, ep=2 * mesh.ep)
        changes.append((f"mesh.ep={folded.ep} mesh.ep_shard={folded.ep_shard}", config, folded))
    peaks = []
    for text, changed, shape in changes:
        batch = at_load(plan_batch(changed, shape), load, changed, shape)
        peaks.append((text, max(rank.peak for rank in plan_memory(changed, shape, batch))))
    return peaks


def _speed_warnings(config: Config, plan: Plan) -> list[str]:
    warnings = []
    if plan.bubble > 0.25:
        warnings.append(
            f"the pipeline idles {plan.bubble:.0%} of a step: {plan.batch.num_micro_batches} micro-batches over "
            f"mesh.pp={plan.mesh.pp} ranks. Raise train.global_batch_size or parallel.stages_per_rank"
        )
    if config.cluster.peak_flops and config.model.num_moe_layers and plan.batch.rows_per_expert < 64:
        warnings.append(
            f"an expert sees {plan.batch.rows_per_expert:.0f} rows a micro-batch, too few to keep a GPU busy. "
            "Raise train.micro_batch_size or mesh.ep"
        )
    saved, interval = plan.checkpoint, plan.checkpoint.interval_seconds
    if interval and saved.write_seconds > interval:
        warnings.append(
            f"a checkpoint takes {saved.write_seconds:,.0f} s to write and is saved every {interval:,.0f} s. Raise "
            "checkpoint.every or checkpoint.every_minutes"
        )
    return warnings


def gib(num_bytes: float) -> str:
    """``36.4 GiB``, or MiB below one GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
