"""Published tensors that make up the parameters of a class of ``transformers``.

transformers' own conversion mapping says which published tensors make up a parameter. This module
reads the mapping as data: it reverts the mapping on views of meta tensors, and each resulting view
shows the slice of a parameter that a published tensor holds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from automoe.classes.build import build_causal_lm
from automoe.classes.params import class_params
from automoe.config.hub import local_folder
from automoe.hf.keys import KeyMap, Piece
from automoe.model.wrapper import names_in


def class_keys(path: str) -> KeyMap:
    """Return the ``KeyMap`` of the layout in which the class is published; others in ``layouts``.

    The other layouts have the prefixes of a wrapper, or the class's own names.
    """
    return _layouts(path, (local_folder(path) / "config.json").read_bytes())


class _View(torch.Tensor):
    """Meta tensor that ignores ``contiguous``, so that every slice stays a view."""

    def contiguous(self, *_: Any, **__: Any) -> torch.Tensor:
        return self


@cache
def _layouts(path: str, stated: bytes) -> KeyMap:
    from transformers.conversion_mapping import get_model_conversion_mapping

    model = build_causal_lm(path)
    tensors = {param.name: torch.empty(param.shape, device="meta") for param in class_params(path)}
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    tables = []
    for with_prefixes in (False, True):
        if with_prefixes:
            model._weight_conversions = transforms
        tables.append(_published(model, tensors))
    own = {
        name: (
            Piece(name, tuple(one.shape), (None,) * one.dim(), (0,) * one.dim(), tuple(one.shape)),
        )
        for name, one in tensors.items()
    }
    unread = tuple(model._keys_to_ignore_on_load_unexpected or ())
    layouts = [
        KeyMap(table=_plain(table), unread=unread) for table in (*tables, own) if table is not None
    ]
    return replace(layouts[0], layouts=tuple(layouts))


def _plain(table: dict[str, tuple[Piece, ...]]) -> dict[str, tuple[Piece, ...]]:
    """Return ``table`` with plain names of the stored tensors."""
    keys = [piece.key for pieces in table.values() for piece in pieces]
    names = names_in(Path(), {}, keys)
    return {
        name: tuple(piece._replace(key=names.plain(piece.key) or piece.key) for piece in pieces)
        for name, pieces in table.items()
    }


def _published(
    model: nn.Module, tensors: dict[str, torch.Tensor]
) -> dict[str, tuple[Piece, ...]] | None:
    """Return the published pieces of each parameter; None if one is no slice of a parameter."""
    from transformers.core_model_loading import revert_weight_conversion

    views = {name: tensor.as_subclass(_View) for name, tensor in tensors.items()}
    try:
        stored = revert_weight_conversion(model, views)
    except NotImplementedError:  # an operation that cannot be reverted
        return None
    of_storage = {id(one.untyped_storage()): name for name, one in tensors.items()}
    table: dict[str, list[Piece]] = {name: [] for name in tensors}
    for key, view in stored.items():
        name = of_storage.get(id(view.untyped_storage()))
        piece = None if name is None else _piece(key, view, tensors[name])
        if piece is None:
            return None
        table[name].append(piece)
    whole = all(
        sum(torch.Size(piece.shape).numel() for piece in pieces) == tensors[name].numel()
        for name, pieces in table.items()
    )
    return {name: tuple(pieces) for name, pieces in table.items()} if whole else None


def _piece(key: str, view: torch.Tensor, tensor: torch.Tensor) -> Piece | None:
    """Return the slice of ``tensor`` behind ``view``, stored as ``key``; None if it is no slice."""
    at = view.storage_offset()
    select: list[int | None] = []
    origin = []
    order = []
    free = list(range(view.dim()))
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        first, at = divmod(at, stride) if stride else (0, at)
        dim = next(
            (one for one in free if view.stride(one) == stride and view.shape[one] <= size), None
        )
        if dim is None:
            select.append(first)
            continue
        free.remove(dim)
        select.append(None)
        origin.append(first)
        order.append(dim)
    if free:
        return None
    size = tuple(view.shape[dim] for dim in order)
    inverse = tuple(order.index(dim) for dim in range(len(order)))
    if inverse == tuple(range(len(order))):
        inverse = ()
    return Piece(
        key, tuple(view.shape), tuple(select), (0,) * len(size), size, inverse, origin=tuple(origin)
    )
