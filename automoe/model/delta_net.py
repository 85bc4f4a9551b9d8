"""Gated delta net (arXiv 2412.06464): attention with a state of fixed size, as in Qwen3-Next.

``automoe.kernels.delta_rule`` has its recurrence. Letters: B rows; R, S and s positions as in
``automoe.model``; H hidden, G key heads (queries too) of width K, N value heads of width V, r = N /
G value heads per key head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automoe.comm.communicators import SINGLE_RANK, Communicator, first_of_rank
from automoe.comm.local_shard import local_shard
from automoe.config.schema import ModelConfig
from automoe.kernels.delta_rule import causal_conv, gated_delta_rule
from automoe.model.attention import AttentionSetup
from automoe.model.backend import BackendConfig
from automoe.model.linear import Features, Linear, take_features
from automoe.model.rows import exchange_heads, exchange_positions, own_heads


class GatedDeltaNet(nn.Module):
    """Linear attention: projections, a short convolution, the gated delta rule and a gated norm.

    in_proj_qkvz holds for each key head K rows of queries, K of keys, r V of values and r V of
    output gates; in_proj_ba holds for each key head r rows of betas and r of decays. With
    ``linear_split_projections`` in_proj_qkv holds all queries, all keys, all values, and gates,
    betas and decays have projections of their own. The convolution's channels are all queries, all
    keys, all values. r is the number of value heads per key head, K the width of a key head, V that
    of a value head.
    """

    first_values = {"dt_bias": "ones", "A_log": "log_uniform"}

    def __init__(self, config: ModelConfig, layer: int, backend: BackendConfig) -> None:
        super().__init__()
        a = config.attention
        hidden = config.hidden_size
        self.key_heads = a.linear_num_key_heads
        self.value_heads = a.linear_num_value_heads
        self.key_dim = a.linear_key_head_dim
        self.value_dim = a.linear_value_head_dim
        self.repeats = self.value_heads // self.key_heads
        keys = self.key_heads * self.key_dim
        values = self.value_heads * self.value_dim
        calls = backend.calls(layer)
        self.tp = backend.pg_collection.tp
        self.gather = calls.gather(self.tp.all_gather)
        self.cp = backend.pg_collection.cp
        self.features = self._own_features(SINGLE_RANK)
        self.conv_features = self._own_features(self.cp)
        channels = 2 * keys + values
        self.is_split = a.linear_split_projections
        if self.is_split:
            self.in_proj_qkv = Linear(hidden, channels, features=self.features)
            self.in_proj_z = Linear(hidden, values)
            self.in_proj_b = Linear(hidden, self.value_heads)
            self.in_proj_a = Linear(hidden, self.value_heads)
        else:
            self.in_proj_qkvz = Linear(hidden, 2 * keys + 2 * values)
            self.in_proj_ba = Linear(hidden, 2 * self.value_heads)
        self.conv1d = nn.Conv1d(
            channels, channels, a.linear_conv_kernel_dim, groups=channels, bias=False
        )
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.norm = backend.norm(self.value_dim, config.norm_eps)
        self.out_proj = Linear(values, hidden)
        self.core_attention = calls.core_attention(gated_delta_rule)

    def forward(self, x_BsH: Tensor, setup: AttentionSetup) -> Tensor:
        """Return the output for hidden states x, both [B, s, H] at this tp rank's s positions.

        Each document of a sequence starts from a state of zeros.
        """
        docs_BR = setup.doc_ids
        x_BSH = self.gather(x_BsH)
        width = self.repeats * self.value_dim
        mixed, z, b, a = self._project(x_BSH, width)
        mixed, b, a = self._exchange(mixed, b, a)  # R positions from here on
        heads = b.shape[2] // self.repeats
        conv_weight = take_features(local_shard(self.conv1d.weight), self.conv_features)
        mixed = F.silu(causal_conv(mixed, conv_weight, docs_BR))
        q, k, v = mixed.split((heads * self.key_dim, heads * self.key_dim, heads * width), dim=-1)
        wide = torch.promote_types(x_BSH.dtype, torch.float32)
        bias_N, log_N = (
            own_heads(self.cp, local_shard(x)).to(wide) for x in (self.dt_bias, self.A_log)
        )
        log_decay_BRN = -log_N.exp() * F.softplus(a.to(wide) + bias_N)
        if docs_BR is not None:  # a document's first token keeps nothing of the state before it
            starts_BR = F.pad(docs_BR[:, 1:] != docs_BR[:, :-1], (1, 0))
            log_decay_BRN = log_decay_BRN.masked_fill(starts_BR.unsqueeze(-1), float("-inf"))
        out_BSNV = exchange_positions(
            self.cp,
            self.core_attention(
                q.unflatten(-1, (heads, -1)),
                k.unflatten(-1, (heads, -1)),
                v.unflatten(-1, (heads * self.repeats, -1)),
                log_decay_BRN,
                b.sigmoid(),
            ),
        )
        gate_BSNV = z.reshape(out_BSNV.shape).to(wide)
        out_BSNV = (self.norm(out_BSNV).to(wide) * F.silu(gate_BSNV)).to(x_BSH.dtype)
        return self.out_proj.project_and_scatter(out_BSNV.flatten(2), self.tp)

    def _project(self, x_BSH: Tensor, width: int) -> tuple[Tensor, ...]:
        """Return (mixed, z, b, a): four projections of x for the heads of this tp rank.

        Args:
            width: r V, the features of the r value heads (of width V) of a key head.

        Returns:
            mixed [B, S, D]: all queries, then keys, then values, the convolution's input. z: output
            gates, r V per key head; the caller reshapes them to [B, S, N, V]. b, a [B, S, N]: betas
            and decays of the N value heads are computed from them.
        """
        if self.is_split:
            return tuple(
                project(x_BSH)
                for project in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
            )
        qkvz_BSGD = self.in_proj_qkvz(x_BSH).unflatten(-1, (-1, 2 * self.key_dim + 2 * width))
        q, k, v, z = qkvz_BSGD.split((self.key_dim, self.key_dim, width, width), dim=-1)
        b, a = self.in_proj_ba(x_BSH).unflatten(-1, (-1, 2 * self.repeats)).chunk(2, dim=-1)
        mixed_BSD = torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1)
        return mixed_BSD, z, b.flatten(2), a.flatten(2)

    def _exchange(
        self, mixed_BSD: Tensor, b_BSN: Tensor, a_BSN: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange positions for heads over cp: return the arguments at R positions of fewer heads.

        The recurrence runs through the whole sequence, so each rank of cp computes 1 / cp of the
        heads. The results are in the order of the arguments, which are returned if cp is 1.

        Args:
            mixed_BSD: the convolution's input: queries, keys, values.
            b_BSN, a_BSN: numbers from which the betas and the decays of N value heads are computed.
        """
        if self.cp.num_ranks == 1:
            return mixed_BSD, b_BSN, a_BSN
        heads = b_BSN.shape[2] // self.repeats
        widths = self.key_dim, self.key_dim, self.repeats * self.value_dim
        mixed = mixed_BSD.split([heads * width for width in widths], dim=-1)
        per_head = [x.unflatten(-1, (heads, -1)) for x in (*mixed, b_BSN, a_BSN)]
        (row_BRGD,) = exchange_heads(self.cp, torch.cat(per_head, dim=-1))
        *mixed, b, a = row_BRGD.split((*widths, self.repeats, self.repeats), dim=-1)
        return torch.cat([x.flatten(2) for x in mixed], dim=-1), b.flatten(2), a.flatten(2)

    def _own_features(self, cp: Communicator) -> Features:
        """Return the slices of queries, keys and values in the channels of the convolution that this rank has.

        They are the heads of this tp rank. If ``cp`` has several ranks, which exchange positions for
        heads, they are only those heads that this cp rank keeps. None: the rank has all channels.
        """
        ranks = self.tp.num_ranks * cp.num_ranks
        if ranks == 1:
            return None
        first = first_of_rank(self.tp, self.key_heads)
        held = self.key_heads // ranks
        first += cp.rank * held
        features = []
        start = 0
        for width in (self.key_dim, self.key_dim, self.repeats * self.value_dim):
            begin = start + first * width
            features.append(slice(begin, begin + held * width))
            start += self.key_heads * width
        return tuple(features)
