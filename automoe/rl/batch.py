"""Batches from outside: ragged samples, checked, and packed into rows of the training step.

One alignment for everything: a value of index i belongs to token i, whose log-probability is that
of token i after the tokens before it. So nothing is known of token 0. A row of the model holds
tokens 0 ... n-2 of a sample with n tokens, and the position of token i predicts token i + 1; routes
have one line for each of these n - 1 positions, as engines return them.

Letters: N samples of a batch, n tokens of a sample, R rows of this data-parallel rank, S positions
of a row, L MoE layers, K top-k.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.batch import least_micro_batches
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config, ModelConfig
from automoe.errors import DataError
from automoe.rl.routes import ROUTES_DTYPE, check_routes

# Names that no value of a sample may have.
RESERVED = "tokens mask routes candidates scored_ids places temperature".split()
# Values that losses multiply by those of tokens: numbers of any more dimensions would be spread over other tokens.
SINGLE = "advantages old_log_probs sampler_log_probs ref_log_probs weights".split()
# Values of a token may be several numbers, such as a teacher's log-probabilities of K ids.
Values = float | Sequence[float] | Sequence[Sequence[float]] | torch.Tensor


@dataclass(frozen=True)
class Sample:
    """One sequence of a batch: tokens, which of them are trained, and what is known of each.

    Attributes:
        tokens: [n] token ids, n >= 2.
        mask: [n] bool, True for tokens that are trained (those of an answer); False at index 0.
        values: by name, one number for the sample or [n, ...] numbers, of which those of tokens
            that are not trained are never read. The losses of ``automoe.rl.losses`` read
            ``advantages``, ``old_log_probs`` (of the weights before the update),
            ``sampler_log_probs`` (of the engine), ``ref_log_probs`` and ``weights``.
        routes: [n - 1, L, K] experts that the engine chose, which the training step repeats; a line
            of -1 routes by the router (``automoe.rl.routes``). None: the router chooses.
        candidates: for each token the ids that top-p or top-k sampling left, empty for all ids;
            log-probabilities are then taken over these ids. None: over all ids everywhere.
        scored_ids: [n, K] ids whose log-probabilities a loss wants beside the token's own
            (``LossInputs.scored``), such as a teacher's likeliest.
    """

    tokens: Sequence[int] | torch.Tensor
    mask: Sequence[bool] | torch.Tensor
    values: Mapping[str, Values] = field(default_factory=dict)
    routes: Any = None
    candidates: Sequence[Sequence[int]] | None = None
    scored_ids: Sequence[Sequence[int]] | torch.Tensor | None = None

    @classmethod
    def of_answer(
        cls, prompt: Sequence[int], answer: Sequence[int], routes: Any = None, **values: Values
    ) -> Sample:
        """Return the sample of an answer to a prompt, whose tokens alone are trained.

        Args:
            values: by name, one number for the sample, or one for each token of the answer.

        Raises:
            DataError: a value is no number.
        """
        padded: dict[str, Values] = {}
        for name, value in values.items():
            try:
                tensor = torch.as_tensor(value, dtype=torch.float64)
            except (TypeError, ValueError, RuntimeError) as error:
                raise DataError(f"field {name}: not numbers of one shape ({error})") from None
            if tensor.dim():
                before = tensor.new_zeros(len(prompt), *tensor.shape[1:])
                tensor = torch.cat((before, tensor))
            padded[name] = tensor
        mask = [False] * len(prompt) + [True] * len(answer)
        return cls([*prompt, *answer], mask, padded, routes)


Batch = Sequence[Sample]


@dataclass(frozen=True)
class Packed:
    """The rows of one data-parallel rank, as CPU tensors.

    Attributes:
        rows: tokens, labels, positions and documents; a sample is a document.
        values: by name [R, S, ...]: the samples' values, and ``places`` int64: the number of the
            predicted token among all tokens of the batch, -1 if it is not trained.
        routes: [R, S, L, K] int16, -1 at positions that route by the router; None: all do.
        lengths: [N] number of tokens of each sample of the whole batch.
    """

    rows: StepBatch
    values: dict[str, torch.Tensor]
    routes: torch.Tensor | None
    lengths: list[int]


@dataclass(frozen=True)
class RowPlan:
    """How the samples of a batch are put into rows.

    Attributes:
        row_length: S.
        micro_batch_rows: rows of a micro-batch.
        num_micro_batches: of each data-parallel rank; rows that nothing fills are padding.
        filled: numbers of the samples in each row of the global batch (``fill_rows``).
    """

    row_length: int
    micro_batch_rows: int
    num_micro_batches: int
    filled: list[list[int]]


class CheckedSample:
    """Tensors of a sample after the checks of one rank.

    Raises:
        DataError: names the sample's number and its field.
    """

    def __init__(self, number: int, sample: Sample, model: ModelConfig, max_tokens: int) -> None:
        self.number = number
        vocab_size = model.vocab_size
        if not isinstance(sample, Sample) or not isinstance(sample.values, Mapping):
            raise self.error("values", "expected a Sample, whose values are a dictionary by name")
        self.tokens = self._tensor("tokens", sample.tokens, torch.int64)
        count = self.tokens.numel()
        self._require(self.tokens.dim() == 1 and count >= 2, "tokens", "two tokens or more")
        self._require(
            count - 1 <= max_tokens,
            "tokens",
            f"at most train.seq_len + 1 = {max_tokens + 1} tokens",
        )
        self._check_ids("tokens", self.tokens, vocab_size)
        self.mask = self._tensor("mask", sample.mask, torch.bool)
        self._require(self.mask.shape == (count,), "mask", f"{count} values, one a token")
        self._require(not self.mask[0], "mask", "False for token 0, which has no log-probability")
        self.values: dict[str, torch.Tensor] = {}
        for name, value in sorted(sample.values.items(), key=lambda item: str(item[0])):
            others = f"another name than {', '.join(RESERVED)}, which the session uses"
            self._require(name not in RESERVED, name, others)
            tensor = self._tensor(name, value, torch.float64)
            if tensor.dim() == 0:
                tensor = tensor.expand(count)
            single = name not in SINGLE or tensor.dim() == 1
            rule = f"one number, or {count}, one a token"
            self._require(len(tensor) == count and single, name, rule)
            trained = tensor[self.mask]
            self._require(bool(trained.isfinite().all()), name, "finite for trained tokens")
            self.values[name] = tensor
        self.routes = None
        if sample.routes is not None:
            self.routes = self._tensor("routes", sample.routes, torch.int64)
            self._require(
                self.routes.dim() == 3 and len(self.routes) == count - 1,
                "routes",
                f"[{count - 1}, MoE layers, K], a line for each token but the last",
            )
            if (wrong := check_routes(self.routes, model)) is not None:
                raise self.error("routes", wrong)
            self.routes = self.routes.to(ROUTES_DTYPE)
        self.scored_ids = None
        if sample.scored_ids is not None:
            self.scored_ids = self._tensor("scored_ids", sample.scored_ids, torch.int64)
            self._require(
                self.scored_ids.dim() == 2 and len(self.scored_ids) == count,
                "scored_ids",
                f"[{count}, K]",
            )
            self._check_ids("scored_ids", self.scored_ids, vocab_size)
        self.candidates = None
        if sample.candidates is not None:
            lists = [self._tensor("candidates", ids, torch.int64) for ids in sample.candidates]
            listed = len(lists) == count and all(ids.dim() == 1 for ids in lists)
            self._require(listed, "candidates", f"{count} lists, one a token")
            for token, ids, trained in zip(self.tokens, lists, self.mask, strict=True):
                self._check_ids("candidates", ids, vocab_size)
                self._require(
                    not trained or not len(ids) or bool((ids == token).any()),
                    "candidates",
                    "lists of trained tokens that contain the token",
                )
            self.candidates = torch.nn.utils.rnn.pad_sequence(
                lists, batch_first=True, padding_value=-1
            )

    def fields(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the sample by the name of their field."""
        values = {"tokens": self.tokens, "mask": self.mask, **self.values, "routes": self.routes}
        values |= {"scored_ids": self.scored_ids, "candidates": self.candidates}
        return {name: tensor for name, tensor in values.items() if tensor is not None}

    def digest(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return a hash of the named tensors, to compare what ranks were handed."""
        hashed = hashlib.sha256()
        for name, tensor in tensors.items():
            hashed.update(f"{name} {tuple(tensor.shape)}".encode())
            hashed.update(tensor.contiguous().numpy().tobytes())
        return hashed.hexdigest()[:16]

    def _tensor(self, name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
        try:
            tensor = torch.as_tensor(value).detach().cpu()
            whole = not (tensor.is_floating_point() and dtype is torch.int64 and tensor.numel())
            self._require(whole, name, "integers")
            return tensor.to(dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self.error(name, f"not numbers of one shape ({error})") from None

    def _check_ids(self, name: str, ids: torch.Tensor, vocab_size: int) -> None:
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if len(wrong):
            raise self.error(
                name, f"id {int(wrong[0])}; the model has ids from 0 to {vocab_size - 1}"
            )

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise self.error(name, f"expected {rule}")

    def error(self, name: str, rule: str) -> DataError:
        """Return the error that a rule of a field is broken."""
        return DataError(f"sample {self.number} of the batch, field {name}: {rule}")


def check_batch(
    batch: Batch, model: ModelConfig, max_tokens: int, reads: Sequence[str] = ()
) -> list[CheckedSample]:
    """Return the checked samples; every rank raises alike, before anything else. Collective.

    Args:
        max_tokens: longest row.
        reads: names of values that the loss reads.

    Raises:
        DataError: a sample is wrong, on any rank, or ranks were handed different samples. The
            message names the sample's number and its field.
    """
    samples: list[CheckedSample] = []
    error = None
    try:
        if not isinstance(batch, Sequence) or not len(batch):
            raise DataError("the batch has no sample, or is no sequence of samples")
        for number, sample in enumerate(batch):
            samples.append(CheckedSample(number, sample, model, max_tokens))
        _check_fields(samples, reads)
    except DataError as wrong:
        error = str(wrong)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise DataError(error)
        return samples
    hashed = hashlib.sha256()
    for sample in samples:
        hashed.update(sample.digest(sample.fields()).encode())
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (error, hashed.hexdigest()))
    for rank, (problem, _) in enumerate(outcomes):
        if problem is not None:
            raise DataError(f"{problem} (on rank {rank})")
    if any(outcome != outcomes[0] for outcome in outcomes):
        raise DataError(_first_difference(samples))
    return samples


def _check_fields(samples: list[CheckedSample], reads: Sequence[str]) -> None:
    """Raise unless the samples have the same values, of the same shapes, and all that are read."""

    def shapes(sample: CheckedSample) -> dict[str, list[int]]:
        fields = sample.fields().items()  # routes are compared with the model
        return {n: [*t.shape[1:]] for n, t in fields if n not in ("routes", "candidates")}

    expected = shapes(samples[0])
    for sample in samples:
        shown = shapes(sample)
        for name in reads:
            if name not in shown:
                raise sample.error(name, "the loss reads it, and it is missing")
        for name in sorted(shown.keys() | expected):
            both = shown.get(name), expected.get(name)
            if None in both:
                raise sample.error(name, "it and sample 0 do not both have it")
            if both[0] != both[1]:
                raise sample.error(name, f"{both[0]} numbers a token, {both[1]} in samples before")
    if "teacher_log_probs" in reads:
        width = expected["scored_ids" if "scored_ids" in reads else "mask"]
        if expected["teacher_log_probs"] != width:
            raise samples[0].error("teacher_log_probs", f"expected {width} numbers a token")


def _first_difference(samples: list[CheckedSample]) -> str:
    """Return what differs between the samples of the ranks. Collective."""
    mine = [{name: s.digest({name: t}) for name, t in s.fields().items()} for s in samples]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    for rank, theirs in enumerate(of_ranks):
        if len(theirs) != len(of_ranks[0]):
            return (
                f"rank {rank} was handed {len(theirs)} samples and rank 0 {len(of_ranks[0])}: hand all "
                "ranks the same batch"
            )
        for number, (here, first) in enumerate(zip(theirs, of_ranks[0], strict=True)):
            if here != first:
                name = next(n for n in here.keys() | first.keys() if here.get(n) != first.get(n))
                return (
                    f"sample {number} of the batch, field {name}: rank {rank} was handed another one than rank 0. "
                    "Hand all ranks the same batch"
                )
    raise AssertionError("digests of whole batches differ, those of their fields do not")


def fill_rows(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Put items of these lengths into rows of ``room``: the best fit, longest first.

    Returns:
        The items' numbers by row; rows are ordered by their first, longest item.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free positions, row), sorted
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        place = bisect_left(spaces, (lengths[item], -1))
        if place == len(spaces):
            rows.append([])
            free, row = room, len(rows) - 1
        else:
            free, row = spaces.pop(place)
        rows[row].append(item)
        insort(spaces, (free - lengths[item], row))
    return rows


def plan_rows(config: Config, shape: MeshShape, lengths: list[int]) -> RowPlan:
    """Return how samples of these lengths are put into rows, and rows into micro-batches.

    Rows are as long as the longest sample, rounded up to what the mesh cuts: attention over longer
    rows would cost more. A micro-batch has at most ``train.micro_batch_size * train.seq_len``
    positions, and the number of micro-batches is one that the pipeline's schedule can run.
    """
    train = config.train
    unit = math.lcm(8, 2 * shape.cp * shape.tp)
    row_length = min(-(-max(lengths) // unit) * unit, train.seq_len)
    filled = fill_rows(lengths, row_length)
    least = least_micro_batches(config, shape)
    rows = -(-len(filled) // shape.dp)
    most = max(1, train.micro_batch_size * train.seq_len // row_length)
    step = shape.pp  # what the schedule can run
    fewest = -(-max(-(-rows // most), least) // step) * step
    # Some more micro-batches may need less padding.
    micro_batches = min(range(fewest, 2 * fewest, step), key=lambda n: n * -(-rows // n))
    return RowPlan(row_length, -(-rows // micro_batches), micro_batches, filled)


def pack(samples: list[CheckedSample], plan: RowPlan, dp_rank: int, dp_size: int) -> Packed:
    """Return the rows of one data-parallel rank: every ``dp_size``-th of those that are filled."""
    shape = (plan.num_micro_batches * plan.micro_batch_rows, plan.row_length)
    packed: dict[str, torch.Tensor] = {}
    lengths = [len(sample.tokens) for sample in samples]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    widest = max((s.candidates.shape[1] for s in samples if s.candidates is not None), default=0)

    def put(name: str, numbers: torch.Tensor, row: int, at: int, filler: int = 0) -> None:
        if name not in packed:  # also on a rank without a filled row
            packed[name] = numbers.new_full((*shape, *numbers.shape[1:]), filler)
        if row % dp_size == dp_rank:
            packed[name][row // dp_size, at : at + len(numbers)] = numbers

    for row, items in enumerate(plan.filled):
        at = 0
        for document, item in enumerate(items):
            sample, here = samples[item], (row, at)
            trained = sample.mask[1:]
            index = torch.arange(len(trained))
            put("tokens", sample.tokens[:-1], *here)
            put("labels", torch.where(trained, sample.tokens[1:], IGNORE), *here, IGNORE)
            put("positions", index, *here)
            put("doc_ids", torch.full_like(index, document), *here, -1)
            put("places", torch.where(trained, index + starts[item] + 1, -1), *here, -1)
            for name, tensor in sample.values.items():
                numbers = tensor[1:].clone()
                numbers[~trained] = 0  # a product with zero would keep NaN
                put(name, numbers, *here)
            if sample.scored_ids is not None:
                put("scored_ids", sample.scored_ids[1:], *here)
            if (ids := sample.candidates) is not None:
                put("candidates", pad(ids[1:], (0, widest - ids.shape[1]), value=-1), *here, -1)
            if sample.routes is not None:
                put("routes", sample.routes, *here, -1)
            at += len(trained)
    columns = [packed.pop(name) for name in ("tokens", "labels", "positions", "doc_ids")]
    rows = StepBatch(*columns, 0, dp_rank * shape[0])
    return Packed(rows, packed, packed.pop("routes", None), lengths)
