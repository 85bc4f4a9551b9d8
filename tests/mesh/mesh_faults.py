"""Mistakes of distributed training, put in on purpose: what the mesh suite must not let pass.

Each fault is a context manager entered on every rank of a case around the real run; leaving it restores
the code, because ranks serve later cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import automoe.comm.tokens
import automoe.model.attention
import automoe.model.attention_masks
import automoe.model.delta_net
import automoe.model.rows
import automoe.moe.balance
import automoe.moe.experts
import automoe.moe.router
import automoe.optim.qk_clip
import automoe.parallel.parallelize
import automoe.parallel.pipeline
import automoe.parallel.runner
import automoe.verify.trajectory
from automoe.comm.collectives import GroupCommunicator
from automoe.comm.communicators import ProcessGroupCollection
from automoe.comm.local_shard import local_shard
from automoe.comm.tokens import IGNORE
from automoe.config.schema import Config
from automoe.model.attention import GroupedQueryAttention
from automoe.model.block import MLP
from automoe.model.linear import Linear
from automoe.moe.balance import LoadCounter, update_expert_bias
from automoe.moe.dispatch.etp import ExpertTensorDispatcher
from automoe.parallel.fsdp import fsdp_modules
from automoe.parallel.shared_gradients import SharedGradients
from automoe.verify.trajectory import Batches, Trajectory
from tests.support.trajectories import run_trajectory

Fault = Callable[[], AbstractContextManager[Any]]


def run_with_fault(config: Config, batches: Batches, steps: int, fault: Fault) -> Trajectory:
    """``run_trajectory`` with the fault in place."""
    with fault():
        return run_trajectory(config, batches, steps)


def _replace(module: object, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    return patch.object(module, name, make(getattr(module, name)))


@contextmanager
def _divide_gradients(select: Callable[[nn.Module], bool], factor: Callable[[Any], float]) -> Iterator[None]:
    def make(original):
        def apply(model, meshes, parallel, dtype):
            original(model, meshes, parallel, dtype)
            for module in fsdp_modules(model):
                if select(module):
                    module.set_gradient_divide_factor(factor(meshes.shape))

        return apply

    with _replace(automoe.parallel.parallelize, "apply_data_parallel", make):
        yield


def expert_gradients_divided_by_ep_shard():
    return _divide_gradients(lambda module: hasattr(module, "down_proj"), lambda shape: float(shape.ep_shard))


def gradients_averaged_over_replicas():
    return _divide_gradients(lambda module: not hasattr(module, "down_proj"), lambda shape: float(shape.dp_replicate))


def balance_loss_gradient_dropped():
    return patch.object(automoe.moe.router, "attach_loss", lambda x, loss: x)


def norm_of_this_rank():
    def local_norm(parameters, pp_group=None):
        local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        return torch.stack([gradient.norm() for gradient in local]).norm()

    return patch.object(automoe.training.step, "global_grad_norm", local_norm)


def norm_of_this_stage():
    return _replace(
        automoe.training.step,
        "global_grad_norm",
        lambda original: lambda parameters, pp_group=None: original(parameters),
    )


def counts_summed_over_cp_twice():
    """The counts of the row, which the sequence loss needs summed, also end up in the counter."""

    def make(original):
        def add(self, chosen, plain, losses, dropped=None):
            dist.all_reduce(chosen)
            original(self, chosen, plain, losses, dropped)

        return add

    return _replace(LoadCounter, "add", make)


def padding_counted():
    return patch.object(
        automoe.comm.tokens.Tokens, "valid", property(lambda tokens: torch.ones_like(tokens.index, dtype=torch.bool))
    )


def _change_inputs(change: Callable[..., dict[str, Any]]) -> AbstractContextManager[Any]:
    def make(original):
        def prepare(batch, meshes, config, device, forced_ids=None):
            inputs, trained = original(batch, meshes, config, device, forced_ids)
            return replace(inputs, **change(inputs, batch, meshes)), trained

        return prepare

    return _replace(automoe.verify.trajectory, "prepare_inputs", make)


def labels_made_after_the_cp_split():
    def change(inputs, batch, meshes):
        same_document = inputs.doc_ids[:, 1:] == inputs.doc_ids[:, :-1]
        labels = torch.full_like(inputs.labels, IGNORE)
        labels[:, :-1] = inputs.tokens[:, 1:].where(same_document, IGNORE)
        return {"labels": labels}

    return _change_inputs(change)


def positions_counted_per_cp_rank():
    def change(inputs, batch, meshes):
        return {"positions": torch.arange(inputs.tokens.shape[1]).expand_as(inputs.tokens).contiguous()}

    return _change_inputs(change)


def loss_divided_by_own_tokens():
    """A mean per rank, then a mean of means: wrong as soon as ranks train different numbers of tokens."""

    def change(inputs, batch, meshes):
        trained = torch.tensor(meshes.shape.dp * int((batch.labels >= 0).sum()))
        return {"counts": replace(inputs.counts, trained=trained)}

    return _change_inputs(change)


def tokens_counted_once_per_cp_rank():
    def change(inputs, batch, meshes):
        larger = {name: getattr(inputs.counts, name) * meshes.shape.cp for name in ("trained", "non_padding")}
        return {"counts": replace(inputs.counts, **larger)}

    return _change_inputs(change)


def expert_bias_moved_per_micro_batch():
    def make(original):
        def balance(self, scores, routing, tokens):
            counts = torch.bincount(routing.topk_expert_ids[tokens.valid].flatten(), minlength=self.num_experts)
            update_expert_bias(self.expert_bias, counts.double(), self.moe.bias_update_rate)
            return original(self, scores, routing, tokens)

        return balance

    return _replace(automoe.moe.router.Router, "_balance", make)


def load_fractions_never_updated():
    def make(original):
        def update(stats, parts, config):
            counts = stats.device_counts.clone()
            counts[:, 1] = 1
            original(replace(stats, device_counts=counts), parts, config)

        return update

    return _replace(automoe.training.step, "update_balance_state", make)


def documents_ignored_across_cp():
    return _replace(
        automoe.model.attention_masks,
        "attention_mask",
        lambda original: lambda tokens, *args, **kwargs: original(replace(tokens, doc_ids=None), *args, **kwargs),
    )


def row_balance_per_cp_rank():
    return patch.object(ProcessGroupCollection, "sum_over_sequence", lambda self, x: self.tp.all_reduce(x))


def initialised_by_rank():
    return _replace(
        automoe.parallel.parallelize,
        "initialize",
        lambda original: lambda part, std, seed: original(part, std, seed + dist.get_rank()),
    )


def gradients_never_reduced():
    return _replace(
        automoe.parallel.runner,
        "defer_reduction",
        lambda original: lambda part, parallel, last: original(part, parallel, last=False),
    )


def gradients_of_the_last_micro_batch_only():
    def make(original):
        def train(self, inputs):
            return original(self, self._split(inputs)[-1])

        return train

    return _replace(automoe.parallel.runner.SingleStageRunner, "train", make)


def pipeline_averages_micro_batches():
    def make(original):
        return {
            name: lambda *args, schedule=schedule, **kwargs: schedule(*args, **(kwargs | {"scale_grads": True}))
            for name, schedule in original.items()
        }

    return _replace(automoe.parallel.pipeline, "SCHEDULES", make)


def _left_out_of_the_optimizer(select: Callable[[str], bool]) -> AbstractContextManager[Any]:
    def make(original):
        def build(parts, *rest):
            for part in parts:
                for name, parameter in part.named_parameters():
                    parameter.requires_grad_(not select(name))
            optimizer = original(parts, *rest)
            for part in parts:
                part.requires_grad_(True)
            return optimizer

        return build

    return _replace(automoe.verify.trajectory, "build_optimizer", make)


def experts_left_out_of_the_optimizer():
    return _left_out_of_the_optimizer(lambda name: ".mlp.experts." in name)


def biases_left_out_of_the_optimizer():
    return _left_out_of_the_optimizer(lambda name: name.endswith("_proj.bias"))


def gradients_averaged_over_expert_replicas():
    return _divide_gradients(lambda module: hasattr(module, "down_proj"), lambda shape: float(shape.ep_replicate))


def gradients_of_copies_not_summed_over_tp():
    """Norms, routers and key/value heads that every tp rank keeps have a gradient of its own tokens alone."""
    return patch.object(SharedGradients, "sum", lambda self: None)


def gradients_of_copies_summed_on_one_tp_rank_only():
    """Right on the first rank, whose tensors are compared; the copies drift apart."""

    def make(original):
        def total(self):
            own = [p.grad.clone() for _, parameters in self._by_group for p in parameters]
            original(self)
            if dist.get_rank() % 2:
                shared = [p for _, parameters in self._by_group for p in parameters]
                for parameter, gradient in zip(shared, own, strict=True):
                    parameter.grad.copy_(gradient)

        return total

    return _replace(SharedGradients, "sum", make)


def loss_counted_by_every_tp_rank():
    def make(original):
        def build(*args):
            runner = original(*args)
            runner.reports_loss = True
            return runner

        return build

    return _replace(automoe.verify.trajectory, "build_runner", make)


def _after_tensor_parallel(change: Callable[..., None]) -> AbstractContextManager[Any]:
    def make(original):
        def apply(model, meshes):
            original(model, meshes)
            change(model, meshes)

        return apply

    return _replace(automoe.parallel.parallelize, "apply_tensor_parallel", make)


def labels_sought_in_the_first_vocabulary_part():
    def change(model, meshes):
        model.first_id = 0

    return _after_tensor_parallel(change)


def tokens_sought_in_the_first_vocabulary_part():
    def change(model, meshes):
        model.embed_tokens.first_id = 0

    return _after_tensor_parallel(change)


def key_value_heads_of_another_group():
    """Fewer heads than ranks: neighbours share one; dealt out in turn, ranks meet the wrong one."""

    def change(model, meshes):
        for module in model.modules():
            if isinstance(module, GroupedQueryAttention):
                heads = module.k_proj.weight.shape[0] // module.head_dim
                head = meshes.coordinate("tp") % heads
                rows = [slice(head * module.head_dim, (head + 1) * module.head_dim)]
                module.k_proj.rows = module.v_proj.rows = rows

    return _after_tensor_parallel(change)


def terms_of_tp_ranks_not_summed():
    return patch.object(GroupCommunicator, "reduce_scatter", GroupCommunicator.local_shard)


def row_balance_per_tp_rank():
    return patch.object(ProcessGroupCollection, "sum_over_sequence", lambda self, x: self.cp.all_reduce(x))


def tokens_of_the_first_tp_rank_believed_everywhere():
    """Index and document of another part of the row: padding is counted where it is not."""

    def make(original):
        def local_shard(self, sequence):
            tokens = original(self, sequence)
            size = tokens.index.shape[1]
            return replace(tokens, index=self.index[:, :size], not_padding=self.not_padding[:, :size])

        return local_shard

    return _replace(automoe.comm.tokens.Tokens, "local_shard", make)


def norm_of_tp_shards_summed_twice():
    """Squares of parameters that every tp rank keeps are added up over tp, like those of shards."""

    def make(original):
        def norm(parameters, pp_group=None):
            squares = original(parameters, pp_group) ** 2
            dist.all_reduce(squares)
            return squares.sqrt()

        return norm

    return _replace(automoe.training.step, "global_grad_norm", make)


def terms_of_etp_ranks_averaged():
    return _replace(
        ExpertTensorDispatcher,
        "__call__",
        lambda original: lambda self, *args, **options: original(self, *args, **options) / self.etp.num_ranks,
    )


def columns_of_the_first_etp_rank_believed_everywhere():
    """Every rank adds its slice of the experts' last bias to the first columns."""

    return patch.object(automoe.moe.experts, "global_offset", lambda bias: (0, 0))


def output_bias_added_by_every_tp_rank():
    def project_and_scatter(self, x, tp):
        out = F.linear(x, local_shard(self.weight))
        return tp.reduce_scatter(out if self.bias is None else out + local_shard(self.bias))

    return patch.object(Linear, "project_and_scatter", project_and_scatter)


def shared_expert_gated_by_tokens_of_the_first_tp_rank():
    def forward(self, x):
        whole = self.tp.all_gather(x)
        out = self.tp.reduce_scatter(self.down_proj(F.silu(self.gate_proj(whole)) * self.up_proj(whole)))
        return out if self.output_gate is None else self.output_gate(whole[:, : x.shape[1]]).sigmoid() * out

    return patch.object(MLP, "forward", forward)


def convolution_of_the_first_heads_on_every_tp_rank():
    return _replace(automoe.model.delta_net, "first_of_rank", lambda original: lambda sequence, heads: 0)


def window_ignored_across_cp():
    return _replace(
        automoe.model.attention_masks,
        "attention_mask",
        lambda original: lambda tokens, keys, window=0, always=False: original(tokens, keys, always=always),
    )


def sinks_of_the_first_heads_on_every_cp_rank():
    return patch.object(automoe.model.attention, "own_heads", lambda ranks, x: x.chunk(ranks.num_ranks)[0])


def decays_of_the_first_heads_on_every_cp_rank():
    return patch.object(automoe.model.delta_net, "own_heads", lambda ranks, x: x.chunk(ranks.num_ranks)[0])


def rows_exchanged_in_the_order_of_ranks():
    """Each rank's head and tail chunk side by side: causality then hides other keys."""
    return patch.object(automoe.model.rows, "_in_row_order", lambda parts: torch.cat(list(parts), dim=1))


def documents_of_a_cp_rank_believed_the_row():
    def make(original):
        def whole_rows(tokens, ranks):
            repeated = tokens.doc_ids.repeat(1, ranks.num_ranks)
            return replace(original(tokens, ranks), doc_ids=repeated)

        return whole_rows

    return _replace(automoe.model.attention, "whole_rows", make)


def recomputation_counted_again():
    return patch.object(automoe.moe.balance, "is_counted", lambda: True)


def logits_of_evaluation_counted():
    return patch.object(automoe.optim.qk_clip, "is_counted", torch.is_grad_enabled)
