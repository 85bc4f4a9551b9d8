"""Compressed attention of DeepSeek-V4 (its report, section 2.3). A query attends to a sliding
window of single positions, and to entries: keys that each pool a whole window of earlier
positions.

Letters of dimensions: ``automoe.model``; here E entries of a row, D width of a head, and of the
indexer's heads in ``EntryIndexer``, G groups of heads, L latent of queries. The formulas are in
``automoe.kernels.compressed_attention``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automoe.comm.local_shard import local_shard
from automoe.config.schema import ModelConfig, has_indexer, ratio_of, window_of
from automoe.kernels.compressed_attention import attend_entries, pool_windows, windows_of
from automoe.kernels.rms_norm import rms_norm
from automoe.kernels.rotation import rotary_cos_sin
from automoe.model.backend import BackendConfig
from automoe.model.indexer import KeyChooser
from automoe.model.linear import Linear
from automoe.moe.balance import attach_loss
from automoe.passes.recompute import save_for_recompute

if TYPE_CHECKING:
    from automoe.model.attention import AttentionSetup


class Compression:
    """Rotation angles and pooling windows of compressed attention (DeepSeek-V4), made once per forward pass.

    Args:
        positions_BS, doc_ids_BS: index of each token in its document, and the document.
        dtype: dtype of cos and sin.
        layers: numbers of the layers that get windows.

    Attributes:
        angles, long_angles: (cos, sin) [B, S, 1, P] of positions, P half the rotated width, in layers with a plain
            window and in layers that also attend to pooled keys.
        windows: {compression ratio: positions that each of a row's E pooled keys is made of (``windows_of``)}.
        entry_angles: {compression ratio: (cos, sin) [B, E, 1, P] of the first position of each pooled key}.
    """

    def __init__(
        self,
        config: ModelConfig,
        positions_BS: Tensor,
        doc_ids_BS: Tensor | None,
        dtype: torch.dtype,
        layers: Collection[int],
    ) -> None:
        attention, rope = config.attention, config.rope
        dim = attention.qk_rope_head_dim
        long = replace(rope, theta=attention.compress_rope_theta)
        self.angles, self.long_angles = (
            rotary_cos_sin(each, dim, positions_BS, dtype)
            for each in (replace(rope, scaling="none"), long)
        )
        ratios = {ratio_of(attention, layer) for layer in layers} - {0}
        self.windows = {ratio: windows_of(positions_BS, doc_ids_BS, ratio) for ratio in ratios}
        self.entry_angles = {
            ratio: rotary_cos_sin(long, dim, windows.first_BE, dtype)
            for ratio, windows in self.windows.items()
        }


class Pooling(nn.Module):
    """Module that pools each window of ``ratio`` positions into one entry, a key of ``dim`` normed numbers.

    If ``ratio`` is the model's ``sparse_ratio``, windows overlap: an entry pools the previous
    window too.
    """

    first_values = {"position_bias": "zeros"}

    def __init__(self, config: ModelConfig, backend: BackendConfig, ratio: int, dim: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.start = dim - config.attention.qk_rope_head_dim
        self.overlaps = ratio == config.attention.sparse_ratio
        width = dim * (1 + self.overlaps)
        self.tp = backend.pg_collection.tp
        self.kv_proj = Linear(config.hidden_size, width)
        self.gate_proj = Linear(config.hidden_size, width)
        self.position_bias = nn.Parameter(torch.empty(ratio, width))
        self.kv_norm = backend.norm(dim, config.norm_eps)

    def entries(self, x_BsH: Tensor, setup: AttentionSetup) -> Tensor:
        """Return the rotated entries (pooled keys) [B, E, D], one per window of the whole row.

        ``x_BsH`` are hidden states at the s positions of this tp rank, which are gathered.
        """
        projections = self.kv_proj, self.gate_proj
        kv, gate = (self.tp.all_gather(project(x_BsH)) for project in projections)
        shared, bias = setup.compression, local_shard(self.position_bias)
        pooled_BED = pool_windows(kv, gate, bias, shared.windows[self.ratio], self.overlaps)
        entries_BE1D = self.kv_norm(pooled_BED).unsqueeze(2)
        angles = shared.entry_angles[self.ratio]
        return setup.rope.rotate(entries_BE1D, *angles, setup.interleaved, self.start).squeeze(2)


class EntryIndexer(KeyChooser, Pooling):
    """Indexer that chooses the entries (pooled windows) to which a query attends.

    It scores keys of its own, which are pooled from the same windows but narrower.
    """

    def __init__(self, config: ModelConfig, backend: BackendConfig) -> None:
        attention = config.attention
        pooling = config, backend, attention.sparse_ratio, attention.index_head_dim
        super().__init__(config, backend, *pooling)
        self.q_b_proj = Linear(attention.q_lora_rank, attention.index_n_heads * self.dim)

    def project(
        self, x_BsH: Tensor, latent_BsL: Tensor, setup: AttentionSetup
    ) -> tuple[Tensor, Tensor]:
        angles = (self.tp.local_shard(angle) for angle in setup.compression.long_angles)
        q_BsJD = self.q_b_proj(latent_BsL).unflatten(-1, (-1, self.dim))
        q_BsJD = setup.rope.rotate(q_BsJD, *angles, setup.interleaved, self.start)
        return q_BsJD, self.entries(x_BsH, setup)


class Compressor(Pooling):
    """Pooling of a layer's positions into entries (one pooled key per window), with an optional indexer.

    The indexer chooses the entries that a query attends to; without one (None) it attends to all
    that it may see.
    """

    def __init__(self, config: ModelConfig, layer: int, backend: BackendConfig) -> None:
        attention = config.attention
        super().__init__(config, backend, ratio_of(attention, layer), attention.head_dim)
        self.indexer = EntryIndexer(config, backend) if has_indexer(attention, layer) else None


class CompressedAttention(nn.Module):
    """Attention to a sliding window and to entries (pooled windows); heads share one vector as key and value.

    Queries are projected from a latent and normalised. The last dims of heads and entries rotate,
    and outputs are rotated back by their query's position. Outputs of a group of heads are
    projected to a narrow width first.
    """

    first_values = {"sinks": "zeros"}

    def __init__(self, config: ModelConfig, layer: int, backend: BackendConfig) -> None:
        super().__init__()
        attention = config.attention
        hidden, dim = config.hidden_size, attention.head_dim
        norm_eps = config.norm_eps
        calls = backend.calls(layer)
        self.tp = backend.pg_collection.tp
        self.gather = calls.gather(self.tp.all_gather)
        self.dim, self.norm_eps, self.scale = dim, norm_eps, dim**-0.5
        self.start = dim - attention.qk_rope_head_dim
        self.window = window_of(attention, layer)
        self.q_a_proj = Linear(hidden, attention.q_lora_rank)
        self.q_a_norm = backend.norm(attention.q_lora_rank, norm_eps)
        self.q_b_proj = Linear(attention.q_lora_rank, attention.num_heads * dim)
        self.kv_proj = Linear(hidden, dim)
        self.kv_norm = backend.norm(dim, norm_eps)
        sizes = attention.o_groups, attention.o_lora_rank
        self.o_a_proj = GroupedLinear(attention.num_heads * dim, *sizes)
        self.o_b_proj = Linear(attention.o_groups * attention.o_lora_rank, hidden)
        self.sinks = nn.Parameter(torch.empty(attention.num_heads)) if attention.sinks else None
        has_entries = ratio_of(attention, layer) > 0
        self.compressor = Compressor(config, layer, backend) if has_entries else None
        self.core_attention = calls.core_attention(attend_entries)

    def forward(self, x_BsH: Tensor, setup: AttentionSetup) -> Tensor:
        """Return the attention output for hidden states, both [B, s, H].

        If the layer has an indexer, the output's backward pass also runs that of the indexer's
        loss.
        """
        shared = setup.compression
        angles = shared.long_angles if self.compressor else shared.angles
        where = *angles, setup.interleaved, self.start
        latent_BsL = self.q_a_norm(self.q_a_proj(x_BsH))
        q_BSND = self.q_b_proj(self.gather(latent_BsL)).unflatten(-1, (-1, self.dim))
        q_BSND = setup.rope.rotate(rms_norm(q_BSND, None, self.norm_eps), *where)
        kv_BS1D = self.gather(self.kv_norm(self.kv_proj(x_BsH))).unsqueeze(2)
        kv_BSD = setup.rope.rotate(kv_BS1D, *where).squeeze(2)
        entries_BED, seen_BSE, inputs = kv_BSD[:, :0], None, None
        if self.compressor:
            entries_BED = self.compressor.entries(x_BsH, setup)
            seen_BSE = shared.windows[self.compressor.ratio].seen_BSE
            if (indexer := self.compressor.indexer) is not None:
                inputs = indexer(x_BsH, latent_BsL, setup)
                seen_BSE = save_for_recompute(indexer.choose, inputs, seen_BSE)
        sinks_N = None if self.sinks is None else local_shard(self.sinks)
        out_BSND = self.core_attention(
            q_BSND, kv_BSD, entries_BED, seen_BSE, sinks_N, setup.doc_ids, self.window, self.scale
        )
        out_BSND = setup.rope.rotate(out_BSND, *where, back=True)
        out_BsH = self.o_b_proj.project_and_scatter(self.o_a_proj(out_BSND.flatten(2)), self.tp)
        if inputs is None:
            return out_BsH
        loss = indexer.loss(inputs, seen_BSE, q_BSND, entries_BED.unsqueeze(2), self.scale, setup)
        return out_BsH if loss is None else attach_loss(out_BsH, loss)


class GroupedLinear(nn.Module):
    """Projection of G groups of input features, [I / G] to [O] each; weight [G O, I / G].

    A tp rank has some of the groups: their weights and inputs.
    """

    def __init__(self, in_features: int, groups: int, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(groups * out_features, in_features // groups))

    def forward(self, x_BSI: Tensor) -> Tensor:
        """Project each group's features, x [B, S, I] of this rank's G groups, to O features: [B, S, G O]."""
        weight_GOI = local_shard(self.weight).unflatten(0, (-1, self.out_features))
        x_BSGI = x_BSI.unflatten(-1, weight_GOI.shape[::2])
        return torch.einsum("bsgi,goi->bsgo", x_BSGI, weight_GOI).flatten(2)
