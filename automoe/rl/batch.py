"""Reinforcement learning samples of unequal length: checks, and packing into rows of a step.

Index i of a per-token field belongs to token i of its sample. The log-probability of token i is
conditioned on tokens 0 ... i-1, so token 0 has none. The model's input for a sample of n tokens is
tokens 0 ... n-2; the position of input token i predicts token i + 1. Routes (expert ids from an
inference engine) have one entry for each of these n - 1 positions, as engines return them.

Letters: N samples of a batch, n tokens of a sample, R rows of this data-parallel rank, S positions
of a row, L MoE layers, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from automoe.comm.agreement import Ranks
from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.batch import least_micro_batches
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config, ModelConfig
from automoe.data.packing import best_fit
from automoe.errors import DataError
from automoe.rl.routes import ROUTES_DTYPE, check_routes

# Names that no value of a sample may have.
RESERVED = (
    "tokens mask routes candidates scored_ids labels positions doc_ids places temperature".split()
)
# What positions of padding have; others have 0.
FILLERS = dict.fromkeys(("doc_ids", "places", "candidates", "routes"), -1) | {"labels": IGNORE}
# Values that losses multiply by those of tokens: numbers of any more dimensions would be spread over other tokens.
SINGLE = "advantages old_log_probs sampler_log_probs ref_log_probs weights".split()
# Values of a token may be several numbers, such as a teacher's log-probabilities of K ids.
Values = float | Sequence[float] | Sequence[Sequence[float]] | torch.Tensor


@dataclass(frozen=True)
class Sample:
    """One token sequence to train on, with its loss mask and the numbers that the loss needs.

    Callers of ``Session`` (the training API for reinforcement learning) make samples. Index i of
    every field belongs to token i.

    Attributes:
        tokens: [n] token ids, n >= 2.
        mask: [n] bool, True for tokens to train on (those of an answer); False at index 0.
        values: name -> one number for the sample, or [n, ...] numbers; entries of untrained tokens
            are ignored. The losses of ``automoe.rl.losses`` read ``advantages``, ``old_log_probs``
            (by the weights before the update), ``sampler_log_probs`` (by the inference engine),
            ``ref_log_probs`` (by the reference model) and ``weights``.
        routes: [n - 1, L, K] expert ids that the inference engine chose in L MoE layers with top-k
            K; the training step uses them instead of the router's choices. Where all K ids are -1,
            the router chooses. None: the router always chooses.
        candidates: for each token, the ids that top-p or top-k sampling could draw; its
            log-probability is normalized over these ids. An empty list, or None for the field: over
            all ids.
        scored_ids: [n, any number] further ids whose log-probabilities the loss gets in
            ``LossInputs.scored``, such as a teacher's likeliest ids.
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
        """Return the sample of a prompt and its answer; only the tokens of the answer are trained.

        Args:
            prompt, answer: P and A token ids.
            routes: [P + A - 1, L, K] expert ids in L MoE layers for all tokens but the last.
            values: name -> one number for the sample, or one for each token of the answer.

        Raises:
            DataError: a value is not numeric.
        """
        padded: dict[str, Values] = {}
        for name, value in values.items():
            tensor = _tensor(name, value, torch.float64)
            if tensor.dim():
                tensor = pad(tensor, (0, 0) * (tensor.dim() - 1) + (len(prompt), 0))
            padded[name] = tensor
        mask = [False] * len(prompt) + [True] * len(answer)
        return cls([*prompt, *answer], mask, padded, routes)


Batch = Sequence[Sample]
Fields = dict[str, torch.Tensor]  # tensors of a checked sample, by the name of their field


@dataclass(frozen=True)
class Packed:
    """Packed training rows of one data-parallel rank, as CPU tensors; ``pack`` makes them.

    Letters: N samples, R rows of this rank, S positions of a row, L MoE layers, K top-k.

    Attributes:
        rows: input tokens, labels, positions and document ids; each sample is a document.
        values: name -> [R, S, ...]: the samples' values for the token that a position predicts.
            ``places`` (int64) is that token's index among all tokens of the batch, -1 if it is not
            trained.
        routes: [R, S, L, K] int16 expert ids to use, -1 where the router chooses; None: no sample
            has expert ids.
        lengths: [N] number of tokens of each sample of the whole batch.
        micro_batch_rows: number of rows of a micro-batch.
    """

    rows: StepBatch
    values: dict[str, torch.Tensor]
    routes: torch.Tensor | None
    lengths: list[int]
    micro_batch_rows: int


def checked_fields(sample: Sample, model: ModelConfig, max_tokens: int) -> Fields:
    """Check one sample against the model; return tensors by name: fields that are not None, and ``values``.

    Each entry of ``Sample.values`` has its own name; one number is repeated for all n tokens.
    ``candidates``, a list of ids per token, becomes [n, longest list], padded with -1.

    Args:
        max_tokens: positions of a training row, ``train.seq_len``. A sample may have one token
            more, since its last token is only predicted.

    Raises:
        DataError: a field is wrong; the message names it.
    """
    if not isinstance(sample, Sample) or not isinstance(sample.values, Mapping):
        raise DataError("field values: expected a Sample, whose values are a dictionary by name")
    tokens = _tensor("tokens", sample.tokens, torch.int64)
    count = tokens.numel()
    rule = f"two tokens or more, and at most train.seq_len + 1 = {max_tokens + 1} of them"
    _require(tokens.dim() == 1 and 2 <= count <= max_tokens + 1, "tokens", rule)
    _check_ids("tokens", tokens, model)
    mask = _tensor("mask", sample.mask, torch.bool)
    rule = f"{count} values, one a token, False for token 0, which has no log-probability"
    _require(mask.shape == (count,) and not mask[0], "mask", rule)
    fields = {"tokens": tokens, "mask": mask}
    for name, value in sample.values.items():
        others = f"another name than {', '.join(RESERVED)}, which the session uses"
        _require(name not in RESERVED, name, others)
        numbers = _tensor(name, value, torch.float64)
        if numbers.dim() == 0:
            numbers = numbers.expand(count)
        single = name not in SINGLE or numbers.dim() == 1
        rule = f"one number, or {count}, one a token"
        _require(len(numbers) == count and single, name, rule)
        _require(bool(numbers[mask].isfinite().all()), name, "finite for trained tokens")
        fields[name] = numbers
    if sample.routes is not None:
        routes = _tensor("routes", sample.routes, torch.int64)
        rule = f"[{count - 1}, MoE layers, K], a line for each token but the last"
        _require(routes.dim() == 3 and len(routes) == count - 1, "routes", rule)
        if (wrong := check_routes(routes, model)) is not None:
            raise DataError(f"field routes: {wrong}")
        fields["routes"] = routes.to(ROUTES_DTYPE)
    if sample.scored_ids is not None:
        scored = _tensor("scored_ids", sample.scored_ids, torch.int64)
        _require(scored.dim() == 2 and len(scored) == count, "scored_ids", f"[{count}, K]")
        _check_ids("scored_ids", scored, model)
        fields["scored_ids"] = scored
    if sample.candidates is not None:
        lists = [_tensor("candidates", ids, torch.int64) for ids in sample.candidates]
        listed = len(lists) == count and all(ids.dim() == 1 for ids in lists)
        _require(listed, "candidates", f"{count} lists, one a token")
        _check_ids("candidates", torch.cat(lists), model)
        padded = pad_sequence(lists, batch_first=True, padding_value=-1)
        holds = (padded == tokens.unsqueeze(1)).any(1) | (padded < 0).all(1) | ~mask
        rule = "lists of trained tokens that contain the token"
        _require(bool(holds.all()), "candidates", rule)
        fields["candidates"] = padded
    return fields


def _tensor(name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value).detach().cpu()
        whole = not (tensor.is_floating_point() and dtype is torch.int64 and tensor.numel())
        _require(whole, name, "integers")
        return tensor.to(dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"field {name}: not numbers of one shape ({error})") from None


def _check_ids(name: str, ids: torch.Tensor, model: ModelConfig) -> None:
    wrong = ids[(ids < 0) | (ids >= model.vocab_size)]
    if len(wrong):
        raise DataError(
            f"field {name}: id {int(wrong[0])}; the model has ids from 0 to {model.vocab_size - 1}"
        )


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise DataError(f"field {name}: expected {rule}")


def check_batch(
    batch: Batch, model: ModelConfig, max_tokens: int, reads: Sequence[str] = ()
) -> list[Fields]:
    """Check all samples of a batch; return each one's fields as tensors by name. Collective.

    If any rank finds an error, every rank raises that error.

    Args:
        batch: the samples, which must be the same on every rank.
        max_tokens: positions of a training row, ``train.seq_len``.
        reads: names of the samples' values that the loss needs.

    Raises:
        DataError: a sample is wrong on any rank, or the ranks got different batches. The message
            names the sample's index and its field.
    """
    samples: list[Fields] = []
    problem = None
    try:
        if not isinstance(batch, Sequence) or not len(batch):
            raise DataError("the batch has no sample, or is no sequence of samples")
        for number, sample in enumerate(batch):
            try:
                samples.append(checked_fields(sample, model, max_tokens))
                _check_shapes(samples[0], samples[-1], reads)
            except DataError as error:
                raise DataError(f"sample {number} of the batch, {error}") from None
    except DataError as error:
        problem = str(error)
    ranks = Ranks()
    digests = {
        f"sample {number} of the batch, field {name}": _digest(tensor)
        for number, fields in enumerate(samples)
        for name, tensor in fields.items()
    }
    outcomes = ranks.all(lambda: (problem, xxhash.xxh3_128_hexdigest(str(digests).encode())))
    for rank, (theirs, _) in enumerate(outcomes):
        if theirs is not None:
            raise DataError(f"{theirs} (on rank {rank})" if ranks.size > 1 else theirs)
    if len(set(outcomes)) > 1:
        first, *others = ranks.all(lambda: digests)
        for rank, later in enumerate(others, 1):
            for where in first | later:
                if first.get(where) != later.get(where):
                    rule = f"rank {rank} was handed another one than rank 0, or none"
                    raise DataError(f"{where}: {rule}. Hand all ranks the same batch")
    return samples


def _digest(tensor: torch.Tensor) -> str:
    return f"{[*tensor.shape]} {xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy())}"


def _check_shapes(first: Fields, fields: Fields, reads: Sequence[str]) -> None:
    """Check that a sample has the same values, with the same shapes per token, as sample 0.

    Args:
        first: fields of sample 0 of the batch.
        fields: fields of the sample to check.
        reads: names of values that the loss needs; the sample must have all of them.

    Raises:
        DataError: a value is missing, or its shape differs.
    """
    expected, shapes = (
        {n: [*t.shape[1:]] for n, t in each.items() if n not in ("routes", "candidates")}
        for each in (first, fields)
    )
    for name in reads:
        if name not in fields:
            raise DataError(f"field {name}: the loss reads it, and it is missing")
    if "teacher_log_probs" in reads:
        expected["teacher_log_probs"] = expected["scored_ids" if "scored_ids" in reads else "mask"]
    for name in expected | shapes:
        sizes = expected.get(name, "no"), shapes.get(name, "no")
        if sizes[0] != sizes[1]:
            rule = f"expected {sizes[0]} numbers a token, as in sample 0, got {sizes[1]}"
            raise DataError(f"field {name}: {rule}")


def pack(samples: list[Fields], config: Config, shape: MeshShape, dp_rank: int) -> Packed:
    """Pack the samples of a batch into rows; return those of data-parallel rank ``dp_rank``.

    Row i goes to data-parallel rank i mod dp, and padding rows give all ranks equally many. Rows
    are only as long as the longest sample, rounded up to a length that the mesh can shard, since
    attention costs more in longer rows. A micro-batch has at most ``train.micro_batch_size *
    train.seq_len`` positions. The number of micro-batches is one that the pipeline schedule
    accepts.

    Args:
        samples: fields of every sample of the batch, from ``check_batch``.
    """
    train = config.train
    lengths = [len(fields["tokens"]) for fields in samples]
    unit = math.lcm(8, 2 * shape.cp * shape.tp)
    row_length = min(-(-(max(lengths) - 1) // unit) * unit, train.seq_len)
    longest_first = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    row_of = best_fit(np.array([lengths[item] - 1 for item in longest_first]), row_length)
    num_rows = int(row_of.max()) + 1
    rows = -(-num_rows // shape.dp)
    most = max(1, train.micro_batch_size * train.seq_len // row_length)
    step = shape.pp  # what the schedule can run
    fewest = -(-max(-(-rows // most), least_micro_batches(config, shape)) // step) * step
    # Some more micro-batches may need less padding.
    micro_batches = min(range(fewest, 2 * fewest, step), key=lambda n: n * -(-rows // n))
    micro_batch_rows = -(-rows // micro_batches)

    starts = [0, *accumulate(lengths)]
    widest = max((f["candidates"].shape[1] for f in samples if "candidates" in f), default=0)
    packed: dict[str, torch.Tensor] = {}
    ends, documents = [0] * num_rows, [0] * num_rows
    for item, row in zip(longest_first, row_of.tolist(), strict=True):
        columns = _columns(samples[item], documents[row], starts[item], widest)
        for name, column in columns.items():
            if name not in packed:  # also on a rank without a filled row
                size = micro_batches * micro_batch_rows, row_length, *column.shape[1:]
                packed[name] = column.new_full(size, FILLERS.get(name, 0))
            if row % shape.dp == dp_rank:
                packed[name][row // shape.dp, ends[row] : ends[row] + len(column)] = column
        ends[row] += lengths[item] - 1
        documents[row] += 1
    columns_of_rows = [packed.pop(name) for name in ("tokens", "labels", "positions", "doc_ids")]
    batch = StepBatch(*columns_of_rows, 0, dp_rank * micro_batches * micro_batch_rows)
    return Packed(batch, packed, packed.pop("routes", None), lengths, micro_batch_rows)


def _columns(fields: Fields, document: int, start: int, widest: int) -> Fields:
    """Return the tensors, [n - 1, ...] by name, that a sample of n tokens contributes to its row.

    Position i has token i as input, and the label and values of token i + 1, among them ``places``:
    that token's index among all tokens of the batch, -1 if it is not trained.

    Args:
        fields: tensors of the checked sample: ``tokens`` and ``mask`` [n], ``routes`` [n - 1, ...], values [n, ...].
        document: index of the sample in its row.
        start: index of the sample's token 0 among all tokens of the batch.
        widest: length of the longest list of ``candidates`` in the batch.
    """
    trained = fields["mask"][1:]
    index = torch.arange(len(trained))
    columns = {
        "tokens": fields["tokens"][:-1],
        "labels": torch.where(trained, fields["tokens"][1:], IGNORE),
        "positions": index,
        "doc_ids": torch.full_like(index, document),
        "places": torch.where(trained, index + start + 1, -1),
    }
    for name, of_tokens in fields.items():
        if name in ("tokens", "mask"):
            continue
        column = of_tokens if name == "routes" else of_tokens[1:]
        if name == "candidates":
            column = pad(column, (0, widest - column.shape[1]), value=-1)
        if column.is_floating_point():  # a product with zero would keep NaN
            column = column.clone()
            column[~trained] = 0
        columns[name] = column
    return columns
