"""Training written down a second time, with nothing of this project in it: ``transformers``, torch's AdamW, formulas.

Documents are split, shuffled and packed in plain Python; each document of a row is a forward pass of its own, so
there is no mask, no padding and no ignored label to get wrong; every loss is a formula over what hooks on the
routers saw. Slow, and the same for no other reason than that both are right.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

END_OF_TEXT = 256  # of the byte tokenizer
Piece = tuple[list[int], list[int | None]]  # tokens of one document, and the next token after each; None at its end
Row = list[Piece]


@dataclass(frozen=True)
class Plan:
    """A run's numbers, by the names that the configuration has for them; ``rates`` are the learning rates by step."""

    rates: Sequence[float]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    rows: int  # a step
    rows_per_micro_batch: int
    seq_len: int
    seed: int = 0
    val_fraction: float = 0.0
    val_batches: int = 0
    document_mask: bool = True
    seq_balance: float = 0.0
    global_balance: float = 0.0
    micro_batch_balance: float = 0.0
    z_loss: float = 0.0
    bias_update_rate: float = 0.0
    spike_factor: float = 0.0
    spike_window: int = 0


@dataclass
class Seen:
    """What a step came to, under the names of the run's record."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    skipped: int
    seq_balance_loss: float
    global_balance_loss: float
    micro_batch_balance_loss: float
    z_loss: float
    counts: list[list[int]] = field(default_factory=list)  # by layer and expert


# -------------------------------------------------------------------------------------------------------- data


def split(texts: Sequence[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """Training and validation documents: a text is for validation if its hash is in the first part of all hashes."""

    def validates(text: str) -> bool:
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return number < val_fraction * 2**64

    return [text for text in texts if not validates(text)], [text for text in texts if validates(text)]


def shuffled(n: int, *key: int) -> list[int]:
    numbers = [int(x) for x in np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)]
    return sorted(range(n), key=lambda i: numbers[i])


def epoch_rows(texts: Sequence[str], seq_len: int, seed: int, epoch: int, document_mask: bool) -> list[Row]:
    """All rows of one pass over the documents."""
    stream: list[tuple[int, int | None, int]] = []  # token, its label, its document
    for document in shuffled(len(texts), seed, epoch, 0):
        tokens = [*texts[document].encode(), END_OF_TEXT]
        stream += [(t, label, document) for t, label in zip(tokens, [*tokens[1:], None], strict=True)]
    rows: list[Row] = []
    for start in range(0, len(stream), seq_len):
        row: Row = []
        last = None
        for token, label, document in stream[start : start + seq_len]:
            if document != last and (document_mask or last is None):
                row.append(([], []))
            row[-1][0].append(token)
            row[-1][1].append(label)
            last = document
        rows.append(row)
    return [rows[i] for i in shuffled(len(rows), seed, epoch, 1)]


def step_rows(texts: Sequence[str], plan: Plan, step: int) -> list[Row]:
    """The rows of step ``step``, counted from 0: a stream that passes over the documents again and again."""
    rows: list[Row] = []
    epoch = 0
    while len(rows) < (step + 1) * plan.rows:
        rows += epoch_rows(texts, plan.seq_len, plan.seed, epoch, plan.document_mask)
        epoch += 1
    return rows[step * plan.rows : (step + 1) * plan.rows]


def num_tokens(rows: Sequence[Row]) -> int:
    return sum(len(tokens) for row in rows for tokens, _ in row)


def num_labels(rows: Sequence[Row]) -> int:
    return sum(label is not None for row in rows for _, labels in row for label in labels)


# ------------------------------------------------------------------------------------------------------- model


class Routers:
    """Hooks on a model's routers, which keep every layer's logits and choices of the last forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
        self.logits: list[torch.Tensor] = []
        self.ids: list[torch.Tensor] = []
        for module in self.modules:
            module.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        self.logits.append(output[0])
        self.ids.append(output[2])


def losses_of_row(
    model: Any, routers: Routers, row: Row
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Sum of a row's cross-entropies, and by layer the logits [T, E] and choices [T, K] of its tokens."""
    total, logits, ids = 0.0, [], []
    for tokens, labels in row:
        routers.logits, routers.ids = [], []
        out = model(torch.tensor([tokens]), use_cache=False).logits[0]
        for place, label in enumerate(labels):
            if label is not None:
                total = total - out[place].log_softmax(-1)[label]
        logits.append(routers.logits)
        ids.append(routers.ids)
    together = [[torch.cat(layer) for layer in zip(*pieces, strict=True)] for pieces in (logits, ids)]
    return torch.as_tensor(total), together[0], together[1]


def one_hot_counts(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.tensor([float((ids == e).sum()) for e in range(num_experts)], dtype=torch.float64)


def is_decayed(name: str) -> bool:
    """By transformers' names: matrices are, norms, biases (of all experts at once, too), sinks and decays are not."""
    return not name.endswith(("norm.weight", "bias", "sinks", "A_log"))


class PlainRun:
    """A model of transformers trained as ``plan`` says.

    Args:
        shares: logits [..., E] -> what each expert is said to be worth, summing to one: the P of balance losses.
    """

    def __init__(
        self, model: Any, texts: Sequence[str], plan: Plan, top_k: int, shares: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.model, self.plan, self.top_k, self.shares = model, plan, top_k, shares
        model.config._experts_implementation = "eager"  # the others know no float64
        self.texts, self.val_texts = split(texts, plan.val_fraction)
        self.routers = Routers(model)
        self.fractions: list[torch.Tensor] = []
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if is_decayed(n) == decayed], "weight_decay": decay}
            for decayed, decay in ((True, plan.weight_decay), (False, 0.0))
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=plan.betas, eps=plan.eps, foreach=False)
        self.tokens = self.skipped = 0
        self.recent: list[float] = []

    def step(self, number: int) -> Seen:
        """Step ``number``, counted from 0."""
        plan = self.plan
        rows = step_rows(self.texts, plan, number)
        trained, present = num_labels(rows), num_tokens(rows)
        size = plan.rows_per_micro_batch
        sums = [0.0] * 5  # cross-entropy, and the four balance losses
        counts: list[torch.Tensor] = []
        plain: list[torch.Tensor] = []
        for start in range(0, len(rows), size):
            seen = [losses_of_row(self.model, self.routers, row) for row in rows[start : start + size]]
            cross_entropy = sum(one[0] for one in seen) / trained
            layers = range(len(self.routers.modules))
            aux = [torch.zeros((), dtype=torch.float64)] * 4
            for layer in layers:
                by_row = [one[1][layer].double() for one in seen]
                chosen = torch.cat([one[2][layer] for one in seen])
                terms = self._balance(layer, by_row, present)
                aux = [a + t for a, t in zip(aux, terms, strict=True)]
                num_experts = by_row[0].shape[-1]
                if len(counts) <= layer:
                    counts.append(torch.zeros(num_experts, dtype=torch.float64))
                    plain.append(torch.zeros(num_experts, dtype=torch.float64))
                counts[layer] += one_hot_counts(chosen, num_experts)
                plain[layer] += one_hot_counts(torch.cat(by_row).topk(self.top_k).indices, num_experts)
            (cross_entropy + sum(aux)).backward()
            sums = [s + float(x.detach()) for s, x in zip(sums, [cross_entropy, *aux], strict=True)]
        norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in self._parameters() if p.grad is not None))
        self._update(number, sums[0], norm, counts, plain)
        self.tokens += trained
        return Seen(
            sums[0], norm, plan.rates[number], self.tokens, self.skipped, *sums[1:], [c.int().tolist() for c in counts]
        )

    def _parameters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def _balance(self, layer: int, by_row: list[torch.Tensor], present: int) -> list[torch.Tensor]:
        """One layer's losses of one micro-batch: its share of those of the step, coefficients included."""
        plan, k = self.plan, self.top_k
        num_experts = by_row[0].shape[-1]
        if len(self.fractions) <= layer:
            self.fractions.append(torch.full((num_experts,), 1 / num_experts, dtype=torch.float64))

        def f(logits: torch.Tensor) -> torch.Tensor:
            return one_hot_counts(logits.topk(k).indices, num_experts) * num_experts / (k * len(logits))

        def mean_share(logits: torch.Tensor) -> torch.Tensor:
            return self.shares(logits).mean(0)

        together = torch.cat(by_row)
        sequence = sum((f(x) * mean_share(x)).sum() * len(x) for x in by_row) / present
        lagged = num_experts * (self.fractions[layer] * mean_share(together)).sum() * len(together) / present
        micro_batch = (f(together) * mean_share(together)).sum() * len(together) / present
        z = together.exp().sum(-1).log().pow(2).sum() / present
        coefs = (plan.seq_balance, plan.global_balance, plan.micro_batch_balance, plan.z_loss)
        return [c * loss for c, loss in zip(coefs, (sequence, lagged, micro_batch, z), strict=True)]

    def _update(
        self, number: int, loss: float, norm: float, counts: list[torch.Tensor], plain: list[torch.Tensor]
    ) -> None:
        plan = self.plan
        if plan.spike_factor and len(self.recent) >= plan.spike_window:
            recent = self.recent[-plan.spike_window :]
            middle = median(recent)
            spread = 1.4826 * median([abs(x - middle) for x in recent])
            if loss > middle + plan.spike_factor * max(spread, 0.001 * middle):
                self.skipped += 1
                self.optimizer.zero_grad()
                return
        scale = min(1.0, plan.grad_clip / norm) if plan.grad_clip else 1.0
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad *= scale
        for group in self.optimizer.param_groups:
            group["lr"] = plan.rates[number]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.recent.append(loss)
        self.skipped = 0
        for layer, module in enumerate(self.routers.modules):
            self.fractions[layer] = plain[layer] / plain[layer].sum()
            if hasattr(module, "e_score_correction_bias"):
                for e, count in enumerate(counts[layer].tolist()):
                    mean = float(counts[layer].sum()) / len(counts[layer])
                    sign = (count < mean) - (count > mean)
                    module.e_score_correction_bias[e] += plan.bias_update_rate * sign

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Nats a trained token and bits a byte over the first validation rows."""
        plan = self.plan
        rows = epoch_rows(self.val_texts, plan.seq_len, 0, 0, plan.document_mask)[: plan.val_batches * plan.rows]
        nats = sum(float(losses_of_row(self.model, self.routers, row)[0]) for row in rows)
        labels = [label for row in rows for _, labels in row for label in labels if label is not None]
        text_bytes = sum(label != END_OF_TEXT for label in labels)
        return nats / len(labels), nats / math.log(2) / text_bytes


def sigmoid_shares(logits: torch.Tensor) -> torch.Tensor:
    scores = 1 / (1 + (-logits).exp())
    return scores / scores.sum(-1, keepdim=True)


def softmax_shares(logits: torch.Tensor) -> torch.Tensor:
    return F.softmax(logits, -1)
