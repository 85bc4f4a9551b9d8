"""Stream of the weights of a model in training, as checkpoint tensors, without a file.

Names, dtypes, quantized codes and bytes are those of an export to a HuggingFace checkpoint
(``automoe.hf.write``): both call ``plan_export`` and ``Transfer.stored``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
import torch.distributed as dist

from automoe.comm.agreement import Ranks
from automoe.errors import ConfigError
from automoe.hf.files import DTYPES, split
from automoe.hf.keys import Encoding
from automoe.hf.save_plan import Transfer, WriteItem, bytes_of, gather
from automoe.hf.shards import Parts, as_parts, config_of
from automoe.hf.wrapper import ALONE
from automoe.hf.write import plan_export, source_of
from automoe.model.causal_lm import CausalLM

# Most copies of a tensor that are alive while it is gathered and encoded.
_COPIES = {"plain": 4, "fp8": 8, "mxfp4": 8, "int4": 8}


class WeightStream:
    """Iterable over the checkpoint tensors of a model in training, in buckets of limited size.

    Every rank makes the stream and iterates over all of it; iterate again after each update.
    Tensors are sorted by name, with numbers in names compared as numbers: the order is the same on
    every mesh and keeps the tensors of a layer together. LoRA adapters are merged into the yielded
    tensors, not into the model.

    Args:
        model: the model, or this rank's pipeline stages of it.
        bucket_bytes: peak memory of an iteration on a rank: the bucket, and the buffers to gather
            its tensors. A single tensor may exceed it.
        dtype: ``bfloat16``, ``float32``, or ``keep``: each tensor's dtype in the checkpoint at
            ``model.hf_path`` (bfloat16 if quantized), or, without such a checkpoint, its dtype in
            the model.
        encoding: ``plain``; ``fp8``: the matrices of layers in block-FP8; ``mxfp4`` or ``int4``:
            the experts quantized.
        layout: ``published`` (names of the published checkpoint), or ``fused`` (names and stacked
            experts of a transformers model).

    Attributes:
        contents: name -> dtype, shape and size (``StoredTensor``) of each tensor, in the stream's
            order, for receivers that need them before the tensors.

    Raises:
        ConfigError: ``dtype`` or ``layout`` is unknown, or the family lacks ``encoding``.
    """

    def __init__(
        self,
        model: Parts | CausalLM,
        bucket_bytes: int = 512 << 20,
        *,
        dtype: str | torch.dtype = "keep",
        encoding: Encoding = "plain",
        layout: Literal["published", "fused"] = "published",
    ) -> None:
        if layout not in ("published", "fused"):
            rule = "the layouts are published and fused"
            raise ConfigError("layout", layout, rule, "Set one of them")
        self._parts = as_parts(model)
        self._options = str(dtype).removeprefix("torch."), encoding
        self._layout = layout
        self._source = source = source_of(config_of(self._parts))
        ranks = Ranks()
        items = self._plan()
        mine = {name: item.target for name, item in items.items() if item.writer == ranks.rank}
        beside = source.beside if source else {}  # parts that are not trained, such as vision
        mine |= {name: beside[name] for name in ranks.share(dict.fromkeys(beside, 1))}
        work = max(
            _COPIES[item.target.encoding] * math.prod(item.pieces[0].shape) * item.dtype.itemsize
            for item in items.values()
        )
        everyone = ranks.all(lambda: (mine, work))
        self._writer = {name: rank for rank, (names, _) in enumerate(everyone) for name in names}
        stored = {name: target for names, _ in everyone for name, target in names.items()}
        ordered = sorted(stored.items(), key=lambda pair: _by_number(pair[0]))
        self._buckets = split(ordered, bucket_bytes - max(most for _, most in everyone))
        self.contents = {
            name: entry._replace(scales=None, encoding="plain")
            for key, target in ordered
            for name, entry in target.in_file(key).items()
        }

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield buckets of full (unsharded) tensors by checkpoint name, the same on every rank. Collective.

        A bucket is emptied when the next one is requested.
        """
        for bucket in self.lent():
            tensors = {name: bucket.pop(name).clone() for name in [*bucket]}
            yield tensors
            tensors.clear()

    @torch.no_grad()
    def lent(self) -> Iterator[dict[str, torch.Tensor]]:
        """Iterate like ``__iter__``, without copies: a tensor may be the model's own memory.

        Use it where tensors are neither changed nor needed after the next bucket is requested.
        """
        as_parts(self._parts)
        items = self._plan()
        ranks = Ranks()
        transfer = Transfer(list(items.values()), ranks, self._source)
        device = next(iter(items.values())).shards[0].local.device
        for bucket in self._buckets:
            tensors: dict[str, torch.Tensor] = {}
            for key, stored in bucket.items():
                item = items.get(key)
                writes = self._writer[key] == ranks.rank
                parts: list[torch.Tensor] = []
                if item is not None:
                    whole = gather(item, ranks.rank)  # by all ranks of the stage
                    if writes:
                        parts = transfer.stored(item, whole)
                    del whole
                elif writes:
                    assert self._source is not None
                    raw = bytes_of(self._source, stored)
                    parts = [raw.view(DTYPES[stored.dtype])]
                for number, (name, place) in enumerate(stored.in_file(key).items()):
                    if writes:
                        tensor = parts[number].detach().to(device).contiguous().view(place.shape)
                    else:
                        tensor = torch.empty(place.shape, dtype=DTYPES[place.dtype], device=device)
                    if ranks.size > 1:
                        raw = tensor.view(-1).view(torch.uint8)
                        dist.broadcast(raw, self._writer[key])
                    tensors[name] = tensor
                del parts
            yield tensors
            tensors.clear()

    def _plan(self) -> dict[str, WriteItem]:
        """Return {checkpoint name: how to make the tensor} for this rank's pipeline stages. Collective."""
        fused = self._layout == "fused"
        plan = plan_export(self._parts, *self._options, self._source, fused)
        names = self._source.names if self._source else ALONE
        return {names.stored(item.key): item for item in plan}


def feed(stream: WeightStream, take: Callable[[Mapping[str, torch.Tensor]], None]) -> None:
    """Call ``take`` with every bucket of ``stream.lent()`` on rank 0. Collective.

    An error that ``take`` raises ends the calls; every rank raises it after the last bucket.
    """
    ranks = Ranks()
    errors: list[Exception] = []
    for bucket in stream.lent():
        if ranks.rank == 0 and not errors:
            try:
                take(bucket)
            except Exception as error:  # the other ranks are waiting for the next bucket
                errors.append(error)

    def outcome() -> None:
        for error in errors:
            raise error

    ranks.lead(outcome, again=False)


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(number or 0), text) for number, text in re.findall(r"(\d+)|(\D+)", name)]
