"""Loss of direct preference optimisation (DPO, arXiv 2305.18290).

Letters of dimensions: ``automoe.model``; here P pairs of a sequence. The preferred answer of a pair
comes first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from automoe.model.loss import LossInputs


def pair_log_probs(nll_BS: Tensor, inputs: LossInputs, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability and the token count of both answers of every pair.

    Both results have shape [B, P, 2]: packed sequences, pairs in them, the two answers.
    The answers of pair p are the documents 2 p and 2 p + 1 of its sequence.

    Args:
        nll_BS: -log p of each token; 0 for prompts.
        inputs: labels and document ids of these tokens; only tokens with a label are counted.
        num_pairs: P; a sequence with fewer pairs gets zeros for the missing ones.
    """
    shape = (len(nll_BS), num_pairs, 2)
    trained = (inputs.labels >= 0).to(nll_BS.dtype)
    sums, lengths = (
        inputs.sum_by_document(x, 2 * num_pairs).view(shape) for x in (nll_BS, trained)
    )
    return -sums, lengths


class PreferenceLoss:
    """Loss of preference pairs (DPO): -log sigmoid(beta * (gain of preferred - gain of other)).

    The gain of an answer is its log-probability minus its reference log-probability, which the
    initial weights give it. ``LossInputs.given["reference"]`` [B, P, 2] holds reference
    log-probabilities for the P pairs of each packed sequence, each (preferred, other). Formulas
    and reported metrics are TRL's (``DPOTrainer``). A call returns this rank's share of the mean
    over the global batch's pairs.

    Args:
        beta: strength of the tie to the reference; a larger value keeps the model closer.
        kind: ``sigmoid``, the formula above; ``ipo`` (arXiv 2310.12036) takes means per token
            instead of sums and squares the difference of gains minus 1 / (2 beta).
    """

    metrics = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
    )
    mean_over = "documents"

    def __init__(self, beta: float, kind: str) -> None:
        self.beta = beta
        self.kind = kind

    def __call__(self, nll_BS: Tensor, inputs: LossInputs) -> Tensor:
        reference = inputs.given["reference"].to(nll_BS.dtype)
        log_probs, lengths = pair_log_probs(nll_BS, inputs, reference.shape[1])
        there_BP = lengths[..., 0] > 0
        num_pairs = (inputs.counts.documents // 2).clamp_min(1)
        gained = torch.where(there_BP.unsqueeze(-1), log_probs - reference, 0.0)

        def mean(x_BP: Tensor) -> Tensor:
            return inputs.share(torch.where(there_BP, x_BP, 0.0).sum() / num_pairs)

        rewards = self.beta * gained.detach()
        margins = rewards[..., 0] - rewards[..., 1]
        of_each = (
            rewards[..., 0],
            rewards[..., 1],
            margins > 0,
            margins,
            log_probs[..., 0],
            log_probs[..., 1],
        )
        for name, x_BP in zip(self.metrics, of_each, strict=True):
            inputs.report(name, mean(x_BP.to(nll_BS.dtype)))
        if self.kind == "ipo":
            gained = gained / lengths.clamp_min(1)
            return mean((gained[..., 0] - gained[..., 1] - 1 / (2 * self.beta)) ** 2)
        return mean(-F.logsigmoid(self.beta * (gained[..., 0] - gained[..., 1])))
