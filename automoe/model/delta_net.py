"""Gated delta net (arXiv 2412.06464): attention with a state of fixed size, as Qwen3-Next has it in most layers.

A head keeps a matrix S that maps keys to values. For each token it forgets by a factor exp(g) and moves what S
says of the token's key towards the token's value, by a share beta:

    S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q

Shapes: B rows, S positions, G key heads (queries too) of width Dk, N value heads of width Dv, r = N / G value
heads a key head, C positions of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from automoe.config.schema import ModelConfig
from automoe.model.attention import AttentionContext
from automoe.model.linear import Linear, local_part
from automoe.model.runtime import Runtime
from automoe.moe.communicators import first_of_rank

CHUNK = 64
UNIT_EPS = 1e-6  # under the root of a squared length


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """The recurrence above, from a state of zeros, a chunk of positions at a time.

    Within a chunk the values that each token adds to the state depend on the tokens before it; with the decays
    c_i summed from the chunk's start they solve a unit lower triangular system (the WY form, section 3.3 and
    arXiv 2406.06484):

        (I + strictly lower of [beta_i exp(c_i - c_j) k_i.k_j]) U = beta (V - exp(c) K S)

    Queries and keys are brought to length one first, and queries divided by sqrt(Dk).

    Args:
        q, k: [B, S, G, Dk].
        v: [B, S, N, Dv].
        log_decay: [B, S, N], g of the formula, none positive.
        beta: [B, S, N], between 0 and 1.

    Returns:
        [B, S, N, Dv] in the dtype of v; computed in at least float32.
    """
    dtype, size, repeats = v.dtype, v.shape[1], v.shape[2] // k.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    q, k = _unit(q.to(wide)) * q.shape[-1] ** -0.5, _unit(k.to(wide))
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
    # Positions behind the row change no state, with a beta of zero, and are cut off at the end.
    q, k, v, log_decay, beta = (
        _chunked(x.to(wide), chunk) for x in (q, k, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1))
    )
    to_here = log_decay.cumsum(3).exp()  # [B, N, M, C, 1]
    # [..., i, j]: from after j to i. Sums of their own, since differences of long sums would lose the short ones.
    square = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device)
    steps = log_decay.expand(*log_decay.shape[:4], chunk).masked_fill(square.triu(), 0)
    between = steps.cumsum(3).masked_fill(square.triu(1), float("-inf")).exp()
    k_to_here = k * to_here
    solved = torch.linalg.solve_triangular(
        beta * between * (k @ k.transpose(3, 4)),
        beta * torch.cat((v, k_to_here), dim=-1),
        upper=False,
        unitriangular=True,
    )
    added, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    seen = between * (q @ k.transpose(3, 4))
    q_to_here, k_to_end = q * to_here, k * between[:, :, :, -1:].transpose(3, 4)
    kept = to_here[:, :, :, -1:]

    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for m in range(v.shape[2]):
        values = added[:, :, m] - of_state[:, :, m] @ state
        outputs.append(q_to_here[:, :, m] @ state + seen[:, :, m] @ values)
        state = state * kept[:, :, m] + k_to_end[:, :, m].transpose(2, 3) @ values
    return torch.cat(outputs, dim=2)[:, :, :size].transpose(1, 2).to(dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


def _chunked(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[B, S, N, D] -> [B, N, M, C, D], zeros behind the row."""
    x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))


def causal_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each channel over its own past. x [B, S, D], weight [D, 1, W], the last one for the position itself."""
    width, size = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    return sum(padded[:, i : i + size] * weight[:, 0, i] for i in range(width))  # type: ignore[return-value]


class ShortConv(nn.Module):
    """The weight [D, 1, W] of ``causal_conv``."""

    def __init__(self, num_channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))


class GatedDeltaNet(nn.Module):
    """Projections, a short convolution over queries, keys and values, the delta rule, a gated norm.

    in_proj_qkvz has, a key head after the other, Dk rows of queries, Dk of keys, r Dv of values and r Dv of
    output gates; in_proj_ba r of betas and r of decays. The convolution's channels are all queries, all keys,
    all values.
    """

    first_values = {"dt_bias": "ones", "A_log": "log_uniform"}

    def __init__(self, config: ModelConfig, runtime: Runtime) -> None:
        super().__init__()
        a, hidden = config.attention, config.hidden_size
        self.key_heads, self.value_heads = a.linear_num_key_heads, a.linear_num_value_heads
        self.key_dim, self.value_dim = a.linear_key_head_dim, a.linear_value_head_dim
        self.repeats = self.value_heads // self.key_heads
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.in_proj_qkvz = Linear(hidden, 2 * keys + 2 * values)
        self.in_proj_ba = Linear(hidden, 2 * self.value_heads)
        self.conv1d = ShortConv(2 * keys + values, a.linear_conv_kernel_dim)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.norm = runtime.norm(self.value_dim, config.norm_eps)
        self.out_proj = Linear(values, hidden)
        self.sequence = runtime.comms.sequence
        self.first_key_head = first_of_rank(self.sequence, self.key_heads)
        self.attend = gated_delta_rule

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [B, S, H] -> [B, S, H]; a state runs through the row, whatever documents are in it."""
        assert context.keys.num_ranks == 1 and context.mask is None, "a recurrent layer sees one whole document a row"
        x = self.sequence.all_gather(x)
        width = self.repeats * self.value_dim
        by_head = self.in_proj_qkvz(x).unflatten(-1, (-1, 2 * self.key_dim + 2 * width))
        q, k, v, z = by_head.split((self.key_dim, self.key_dim, width, width), dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (-1, 2 * self.repeats)).chunk(2, dim=-1)
        heads = q.shape[2]
        mixed = torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1)
        mixed = F.silu(causal_conv(mixed, self._conv_weight(heads)))
        q, k, v = mixed.split((heads * self.key_dim, heads * self.key_dim, heads * width), dim=-1)
        wide = torch.promote_types(x.dtype, torch.float32)
        step = F.softplus(a.flatten(2).to(wide) + local_part(self.dt_bias).to(wide))
        out = self.attend(
            q.unflatten(-1, (heads, -1)),
            k.unflatten(-1, (heads, -1)),
            v.unflatten(-1, (heads * self.repeats, -1)),
            -local_part(self.A_log).to(wide).exp() * step,
            b.flatten(2).sigmoid(),
        )
        gate = z.reshape(out.shape).to(wide)
        out = (self.norm(out).to(wide) * F.silu(gate)).to(x.dtype)
        return self.out_proj.reduce_scatter(out.flatten(2), self.sequence)

    def _conv_weight(self, heads: int) -> torch.Tensor:
        """[channels of ``heads`` key heads, 1, W]: all of it, or where tp cuts heads, this rank's three pieces."""
        weight = local_part(self.conv1d.weight)
        if heads == self.key_heads:
            return weight
        keys, width = self.key_heads * self.key_dim, self.repeats * self.value_dim
        pieces = []
        for start, per_head in ((0, self.key_dim), (keys, self.key_dim), (2 * keys, width)):
            pieces.append(weight.narrow(0, start + self.first_key_head * per_head, heads * per_head))
        return torch.cat(pieces)
