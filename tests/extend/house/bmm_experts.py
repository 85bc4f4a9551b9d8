"""Experts as one batched product over rows padded to the fullest expert."""

import torch


def bmm_experts(
    x, gather_idx, offsets, probs, w_gate_up, w_down, b_gate_up=None, b_down=None, activation=None
) -> torch.Tensor:
    ends = offsets.to(torch.int64)
    counts = ends.diff(prepend=ends.new_zeros(1))
    expert = torch.repeat_interleave(torch.arange(len(ends)), counts)
    place = torch.arange(len(gather_idx)) - (ends - counts)[expert]
    rows = x.new_zeros(len(ends), int(counts.max()), x.shape[1]).index_put((expert, place), x[gather_idx])
    weights = probs.new_zeros(*rows.shape[:2]).index_put((expert, place), probs).unsqueeze(-1).to(x.dtype)
    act = activation(rows @ w_gate_up[:, 0].mT, rows @ w_gate_up[:, 1].mT)
    return ((act * weights) @ w_down.mT)[expert, place]
