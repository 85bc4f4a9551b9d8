"""Gated delta net (arXiv 2412.06464): attention with a state of fixed size, as in Qwen3-Next.

A head keeps a matrix S that maps keys to values. For each token the state decays by a factor
exp(g), and its value for the token's key moves towards the token's value by a share beta:

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q

Letters: B rows; R, S and s positions as in ``automoe.model``; H hidden, G key heads (queries too)
of width K, N value heads of width V, r = N / G value heads per key head, C positions of a chunk, M
chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automoe.comm.communicators import SINGLE_RANK, Communicator, first_of_rank
from automoe.comm.local_shard import local_shard
from automoe.config.schema import ModelConfig
from automoe.model.attention import AttentionSetup
from automoe.model.backend import BackendConfig
from automoe.model.linear import Features, Linear, take_features
from automoe.model.rows import exchange_heads, exchange_positions, own_heads

CHUNK = 64
UNIT_EPS = 1e-6  # added to a squared length under the root


def gated_delta_rule(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSNV: Tensor,
    log_decay_BSN: Tensor,
    beta_BSN: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """Return the outputs of the gated delta rule (arXiv 2412.06464), from a state of zeros.

    It computes a chunk of positions at a time. Within a chunk the values U that tokens add to the
    state depend on the tokens before them. With c_i, the log decays summed from the chunk's start,
    and S, the state before the chunk, U solves a unit lower triangular system (the WY form, section
    3.3 and arXiv 2406.06484):

        (I + strictly lower of [beta_i exp(c_i - c_j) k_i.k_j]) U = beta (V - exp(c) K S)

    Queries and keys are normalised to length one first, and queries divided by sqrt(K).

    Args:
        log_decay_BSN: logarithm of the factor that each token multiplies the state by, at most 0.
        beta_BSN: strength with which a token writes, between 0 and 1.
        chunk: positions per chunk.

    Returns:
        [B, S, N, V] in the dtype of v; computed in at least float32.
    """
    dtype = v_BSNV.dtype
    size = v_BSNV.shape[1]
    repeats = v_BSNV.shape[2] // k_BSGK.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    # [B, S, N, D], for any width D, becomes [B, N, M, C, D]. Padding after the row has a beta of
    # zero, so it changes no state; it is cut off at the end.
    q_BNMCK, k_BNMCK, v_BNMCV, log_decay_BNMC1, beta_BNMC1 = (
        F.pad(x.to(wide).transpose(1, 2), (0, 0, 0, -size % chunk)).unflatten(2, (-1, chunk))
        for x in (
            (_unit(q_BSGK.to(wide)) * q_BSGK.shape[-1] ** -0.5).repeat_interleave(repeats, dim=2),
            _unit(k_BSGK.to(wide)).repeat_interleave(repeats, dim=2),
            v_BSNV,
            log_decay_BSN.unsqueeze(-1),
            beta_BSN.unsqueeze(-1),
        )
    )
    to_here_BNMC1 = log_decay_BNMC1.cumsum(3).exp()
    # Entry [..., i, j] sums the log decays of positions j + 1 ... i. Each is summed by itself, since
    # a difference of long sums would lose the precision of a short one.
    square_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=v_BSNV.device)
    steps_BNMCC = log_decay_BNMC1.expand(*log_decay_BNMC1.shape[:4], chunk).masked_fill(
        square_CC.triu(), 0
    )
    between_BNMCC = steps_BNMCC.cumsum(3).masked_fill(square_CC.triu(1), float("-inf")).exp()
    k_to_here_BNMCK = k_BNMCK * to_here_BNMC1
    solved = torch.linalg.solve_triangular(
        beta_BNMC1 * between_BNMCC * (k_BNMCK @ k_BNMCK.transpose(3, 4)),
        beta_BNMC1 * torch.cat((v_BNMCV, k_to_here_BNMCK), dim=-1),
        upper=False,
        unitriangular=True,
    )
    added_BNMCV, of_state_BNMCK = solved.split((v_BNMCV.shape[-1], k_BNMCK.shape[-1]), dim=-1)
    seen_BNMCC = between_BNMCC * (q_BNMCK @ k_BNMCK.transpose(3, 4))
    q_to_here_BNMCK = q_BNMCK * to_here_BNMC1
    k_to_end_BNMCK = k_BNMCK * between_BNMCC[:, :, :, -1:].transpose(3, 4)
    kept_BNM11 = to_here_BNMC1[:, :, :, -1:]

    state_BNKV = v_BNMCV.new_zeros(*v_BNMCV.shape[:2], k_BNMCK.shape[-1], v_BNMCV.shape[-1])
    outputs = []
    for m in range(v_BNMCV.shape[2]):
        values_BNCV = added_BNMCV[:, :, m] - of_state_BNMCK[:, :, m] @ state_BNKV
        outputs.append(q_to_here_BNMCK[:, :, m] @ state_BNKV + seen_BNMCC[:, :, m] @ values_BNCV)
        state_BNKV = (
            state_BNKV * kept_BNM11[:, :, m] + k_to_end_BNMCK[:, :, m].transpose(2, 3) @ values_BNCV
        )
    return torch.cat(outputs, dim=2)[:, :, :size].transpose(1, 2).to(dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


def causal_conv(x_BSD: Tensor, weight_D1W: Tensor, doc_ids_BS: Tensor | None = None) -> Tensor:
    """Convolve each of D channels of x over its W last positions, the current one included.

    Positions of other documents count as zeros (None: a sequence is one document). The result is
    [B, S, D].
    """
    width = weight_D1W.shape[-1]
    size = x_BSD.shape[1]
    padded_BSD = F.pad(x_BSD, (0, 0, width - 1, 0))
    terms = []
    for i in range(width):
        term_BSD = padded_BSD[:, i : i + size] * weight_D1W[:, 0, i]
        if doc_ids_BS is not None:  # a product with a mask saves only the mask
            shifted_BS = F.pad(doc_ids_BS, (width - 1, 0))[:, i : i + size]
            term_BSD = term_BSD * (shifted_BS == doc_ids_BS).unsqueeze(-1)
        terms.append(term_BSD)
    return sum(terms)  # type: ignore[return-value]


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

        The recurrence runs through the whole sequence, so each rank of cp computes some of the
        heads.

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
        """Return this rank's channels of the convolution: slices of queries, keys, values; None: all.

        They are the channels of this tp rank's heads. If ``cp`` has several ranks, positions are
        exchanged for heads, and only the channels of the heads that are left to this rank are
        returned.
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
