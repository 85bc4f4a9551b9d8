"""The plan's waits are those of the order in which NCCL runs an interleaved pipeline's sends and receives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nccl_order import Event, Run, batches, events_of_a_step

from automoe.config.schema import AttentionConfig, Config, MeshConfig, ModelConfig, ParallelConfig, TrainConfig
from automoe.planner.schedule import StageTimes, simulate
from automoe.verify.pool import RankPool

FORWARD, BACKWARD = 1.0, 2.0


@pytest.mark.parametrize(
    ("pp", "stages_per_rank", "micro_batches"),
    [(4, 2, 8), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((2, 2, 8), (3, 2, 9), (8, 2, 16)))],
)
def test_waits_are_the_plans(ranks: RankPool, pp: int, stages_per_rank: int, micro_batches: int) -> None:
    """And would be far longer in one group of all pipeline ranks."""
    model = ModelConfig(
        family="llama",
        num_layers=pp * stages_per_rank,
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_experts=0,
        first_k_dense=pp * stages_per_rank,
        attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8),
    )
    config = Config(
        mesh=MeshConfig(pp=pp, dp_shard=1),
        model=model,
        parallel=ParallelConfig(schedule="Interleaved1F1B", stages_per_rank=stages_per_rank),
        train=TrainConfig(seq_len=4, global_batch_size=micro_batches, micro_batch_size=1),
    )
    events = ranks.run(events_of_a_step, pp, config, batches)
    for rank in events:
        # three numbers of each stage and micro-batch: a computation each way, what it needs, and what it gives
        assert sum(event.kind in "FB" for event in rank) == 2 * stages_per_rank * micro_batches
        assert len({event.group for event in rank}) == 3, "none, that of the rank before and that of the one behind"
    together = [[replace(event, group=event.group and "pp") for event in rank] for rank in events]
    for border in (0.05, 0.2):
        stages = (StageTimes(FORWARD, BACKWARD),) * (pp * stages_per_rank)
        planned = simulate("Interleaved1F1B", stages, pp, micro_batches, border)
        apart, one = (Run(found, FORWARD, BACKWARD, border).end() for found in (events, together))
        assert apart == pytest.approx(planned, rel=0.01)
        assert one > (1.1 if pp > 2 else 1.0) * apart


def test_an_early_receive_delays_a_later_send() -> None:
    """Of a rank that receives from one rank, late, and sends to another, in one group and in two."""
    first = [Event("F", 0, 0), Event("F", 0, 1), Event("F", 0, 2), Event("send F", 0, 2, "a")]
    middle = [Event("recv F", 1, 2, "a"), Event("B", 4, 0), Event("send B", 4, 0, "b"), Event("F", 1, 2)]
    last = [Event("recv B", 3, 0, "b"), Event("B", 3, 0)]
    assert Run([first, middle, last], 10.0, 1.0, 0.0).end() == 40.0
    apart = Run([first, middle, last], 10.0, 1.0, 0.0)
    apart.end()
    assert apart.arrived["B", 3, 0] == 1.0
    one = Run(
        [[replace(event, group=event.group and "a") for event in rank] for rank in (first, middle, last)],
        10.0,
        1.0,
        0.0,
    )
    one.end()
    assert one.arrived["B", 3, 0] == 30.0
