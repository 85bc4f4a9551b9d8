"""Rules of context parallelism: what cuts evenly, and what each ``parallel.context`` serves."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from automoe.config.mesh_shape import MeshShape, uses_ring, uses_ulysses
from automoe.config.rules import Row, divides
from automoe.config.schema import Config

_GATHER = "Set parallel.context=gather"

# Rows are laid out as a table: key and whether it is broken, the rule with its numbers, the remedy.
# fmt: off

def context_rows(config: Config, shape: MeshShape, device: str) -> Iterator[Row]:
    """Yield the rules of ``mesh.cp`` and ``parallel.context``.

    ``config`` must have passed the rules of its model on tp.
    """
    if shape.cp == 1:
        return
    seq_len = config.train.seq_len
    pieces = 2 * shape.cp
    yield divides("train.seq_len", seq_len, pieces,
        f"with mesh.cp={shape.cp} every rank holds a head piece and a tail piece, 2*cp = {pieces} equal pieces: "
        f"{seq_len} % {pieces} = {seq_len % pieces}")
    if uses_ring(config, shape):
        yield from _ring_rows(config, device)
    if uses_ulysses(config, shape):
        yield from _ulysses_rows(config, shape)
    if heads := config.model.attention.linear_num_key_heads:
        here = heads // shape.tp
        yield ("mesh.cp", here % shape.cp != 0,
               "cp ranks exchange positions for equal numbers of a delta net's key heads, whose state runs through the "
               f"whole row: linear_num_key_heads / tp = {heads} / {shape.tp} = {here}, {here} % {shape.cp} = "
               f"{here % shape.cp}", f"Nearest valid choice: mesh.cp={gcd(here, shape.cp)}")


def _ring_rows(config: Config, device: str) -> Iterator[Row]:
    attention = config.model.attention
    for key in ("sinks", "sliding_window"):
        value = getattr(attention, key)
        yield ("parallel.context", bool(value),
               f"a ring has only causal and document masks, and the model has model.attention.{key}={value}", _GATHER)
    yield ("parallel.context", config.data.document_mask and device != "cpu",
           "ring attention on CUDA has no document mask, and data.document_mask=true asks for one",
           f"{_GATHER}, or data.document_mask=false")


def _ulysses_rows(config: Config, shape: MeshShape) -> Iterator[Row]:
    attention = config.model.attention
    heads = attention.num_heads // shape.tp
    other = f"{_GATHER}, or mesh.cp="
    yield ("parallel.context", heads % shape.cp != 0,
           f"with ulysses each cp rank attends with equal numbers of heads: num_heads / tp = {attention.num_heads} / "
           f"{shape.tp} = {heads}, {heads} % {shape.cp} = {heads % shape.cp}", f"{other}{gcd(heads, shape.cp)}")
    if attention.kind == "gqa":
        keys = max(attention.num_kv_heads // shape.tp, 1)
        yield ("parallel.context", keys % shape.cp != 0 and shape.cp % keys != 0,
               "with ulysses key/value heads divide over cp ranks or cp ranks over them: num_kv_heads / tp = "
               f"{attention.num_kv_heads} / {shape.tp} = {keys}, cp = {shape.cp}",
               f"{other}{gcd(keys, shape.cp)}")
