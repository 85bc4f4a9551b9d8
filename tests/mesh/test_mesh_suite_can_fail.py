"""Tests of the test: known mistakes turn the suite's comparison red, and at the quantity that they spoil."""

from __future__ import annotations

import inspect

import mesh_faults as faults
import pytest
from mesh_cases import STEPS, Case, batches, run_case
from mesh_faults import Fault, run_with_fault
from mesh_mappings import CLIP, CORE, EVALUATED, FULL, NODES, PARTS, ULYSSES
from test_mesh_float64 import TOLERANCE

from automoe.verify.pool import RankPool
from automoe.verify.trajectory import merge_trajectories
from tests.support.trajectories import differences

# Meshes of the core, so that each of these mistakes would stop any change.
FOLDED = Case("deepseek", dict(dp_shard=2), rows=4)
HYBRID = Case("qwen3", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, **NODES)
TWO = Case("qwen3", dict(dp_shard=2, ep=2), rows=1)
CONTEXT = Case("deepseek", dict(cp=2), rows=4, document_mask=False)
STAGES = Case("deepseek", dict(pp=2), rows=2)
ALONE = Case("deepseek", rows=2)
TENSOR = Case("deepseek", dict(tp=2), rows=4)
FEW_HEADS = Case("qwen3", dict(tp=4, ep=4), rows=4, dispatcher="allgather")
EXPERT_TENSOR = Case("deepseek", dict(dp_shard=2, tp=2, etp=2), rows=2)
EXPERT_COPIES = Case("qwen3", dict(dp_replicate=2, tp=2, ep=2, ep_replicate=2), rows=2)
GATED_TENSOR = Case("qwen2", dict(tp=4, ep=4), rows=4, parallel=FULL, **NODES)
BIASED_TENSOR = Case("gpt-oss", dict(dp_shard=2, tp=2, etp=2), rows=2, document_mask=False)
DELTA_NETS = Case("qwen3-next", dict(tp=2, ep=2), rows=4, parallel=PARTS)
WINDOWS = Case("gpt-oss", dict(cp=2, etp=2), rows=4)
EXCHANGED = Case("gpt-oss", dict(cp=2, tp=2, ep=2), rows=4, parallel=ULYSSES)
EXCHANGED_STATES = Case("qwen3.5", dict(cp=4, ep=2), rows=4)
VALIDATED = Case("mixtral", dict(pp=2), rows=2, optim=CLIP, train=EVALUATED)

# fault, the mesh it is put in, and the first thing that differs: step, kind, part of the name
FAULTS = [
    (faults.expert_gradients_divided_by_ep_shard, FOLDED, 0, "gradient", "mlp.experts."),
    (faults.gradients_averaged_over_replicas, HYBRID, 0, "gradient", "embed_tokens"),
    (faults.balance_loss_gradient_dropped, TWO, 0, "gradient", ""),
    (faults.norm_of_this_rank, TWO, 0, "gradient norm", ""),
    (faults.norm_of_this_stage, STAGES, 0, "gradient norm", ""),
    (faults.counts_summed_over_cp_twice, CONTEXT, 0, "expert counts", ""),
    (faults.padding_counted, TWO, 0, "seq_balance_loss", ""),
    (faults.labels_made_after_the_cp_split, WINDOWS, 0, "loss", ""),
    (faults.positions_counted_per_cp_rank, CONTEXT, 0, "loss", ""),
    (faults.loss_divided_by_own_tokens, TWO, 0, "loss", ""),
    (faults.tokens_counted_once_per_cp_rank, CONTEXT, 0, "loss", ""),
    (faults.expert_bias_moved_per_micro_batch, ALONE, 0, "loss", ""),
    (faults.load_fractions_never_updated, TWO, 1, "global_balance_loss", ""),
    (faults.documents_ignored_across_cp, WINDOWS, 0, "loss", ""),
    (faults.row_balance_per_cp_rank, CONTEXT, 0, "seq_balance_loss", ""),
    (faults.initialised_by_rank, TWO, 0, "loss", ""),
    (faults.gradients_never_reduced, TWO, 0, "gradient", "embed_tokens"),
    (faults.gradients_of_the_last_micro_batch_only, ALONE, 0, "loss", ""),
    (faults.pipeline_averages_micro_batches, STAGES, 0, "gradient", "embed_tokens"),
    (faults.experts_left_out_of_the_optimizer, TWO, 1, "loss", ""),
    (faults.gradients_averaged_over_expert_replicas, EXPERT_COPIES, 0, "gradient", "mlp.experts."),
    (faults.gradients_of_copies_not_summed_over_tp, TENSOR, 0, "gradient", "norm"),
    (faults.gradients_of_copies_summed_on_one_tp_rank_only, TENSOR, 1, "loss", ""),
    (faults.loss_counted_by_every_tp_rank, TENSOR, 0, "loss", ""),
    (faults.labels_sought_in_the_first_vocabulary_part, TENSOR, 0, "loss", ""),
    (faults.tokens_sought_in_the_first_vocabulary_part, TENSOR, 0, "loss", ""),
    (faults.key_value_heads_of_another_group, FEW_HEADS, 0, "loss", ""),
    (faults.terms_of_tp_ranks_not_summed, TENSOR, 0, "loss", ""),
    (faults.row_balance_per_tp_rank, TENSOR, 0, "seq_balance_loss", ""),
    (faults.tokens_of_the_first_tp_rank_believed_everywhere, TENSOR, 0, "seq_balance_loss", ""),
    (faults.norm_of_tp_shards_summed_twice, TENSOR, 0, "gradient norm", ""),
    (faults.terms_of_etp_ranks_averaged, EXPERT_TENSOR, 0, "loss", ""),
    (faults.shared_expert_gated_by_tokens_of_the_first_tp_rank, GATED_TENSOR, 0, "loss", ""),
    (faults.biases_left_out_of_the_optimizer, GATED_TENSOR, 1, "loss", ""),
    (faults.output_bias_added_by_every_tp_rank, BIASED_TENSOR, 0, "gradient", "o_proj.bias"),
    (faults.columns_of_the_first_etp_rank_believed_everywhere, WINDOWS, 0, "gradient", "mlp.experts.down_proj_bias"),
    (faults.convolution_of_the_first_heads_on_every_tp_rank, DELTA_NETS, 0, "loss", ""),
    (faults.window_ignored_across_cp, WINDOWS, 0, "loss", ""),
    (faults.sinks_of_the_first_heads_on_every_cp_rank, EXCHANGED, 0, "loss", ""),
    (faults.rows_exchanged_in_the_order_of_ranks, EXCHANGED, 0, "loss", ""),
    (faults.documents_of_a_cp_rank_believed_the_row, EXCHANGED_STATES, 0, "loss", ""),
    (faults.decays_of_the_first_heads_on_every_cp_rank, EXCHANGED_STATES, 0, "loss", ""),
    (faults.recomputation_counted_again, GATED_TENSOR, 0, "seq_balance_loss", ""),
    (faults.logits_of_evaluation_counted, VALIDATED, 2, "loss", ""),
]


@pytest.mark.one_in(40)
@pytest.mark.parametrize("fault, case, step, kind, name", FAULTS, ids=map(lambda row: row[0].__name__, FAULTS))
def test_a_fault_is_seen_where_it_acts(
    ranks: RankPool, reference, fault: Fault, case: Case, step: int, kind: str, name: str
) -> None:
    broken = ranks.run(run_with_fault, case.world_size, case.config, batches, STEPS, fault)
    found = differences(merge_trajectories(broken), reference(case), TOLERANCE)
    assert found, "the suite would have passed"
    assert (found[0].step, found[0].kind) == (step, kind), str(found[0])
    assert name in found[0].name, str(found[0])


INTACT = [TWO, FOLDED, CONTEXT, STAGES, ALONE, TENSOR, FEW_HEADS, EXPERT_TENSOR, EXPERT_COPIES, GATED_TENSOR]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", INTACT, ids=str)
def test_without_the_fault_nothing_differs(ranks: RankPool, reference, case: Case) -> None:
    """Runs after the faults, on the same processes: none of them was left in."""
    assert not differences(run_case(ranks, case), reference(case), TOLERANCE)


def test_every_fault_strikes_a_mesh_of_the_core() -> None:
    """So that what is sampled and what is exhaustive may differ by day, and each of these is still seen every day."""
    struck = {row[0].__name__: row[1] for row in FAULTS}
    assert struck.keys() == {name for name, value in vars(faults).items() if is_fault(name, value)}
    assert [name for name, case in struck.items() if case not in CORE] == []


def is_fault(name: str, value: object) -> bool:
    return inspect.isfunction(value) and not name.startswith("_") and not inspect.signature(value).parameters
