"""Tables of rules: names and words in them exist, and what the engine derives is right for any numbers."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from dataclasses import replace
from types import ModuleType

import pytest

from automoe.config import recompute, rules, rules_kernels, rules_model, rules_parallel, rules_settings
from automoe.config.convert import check_key, typed
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.rule_engine import Scope, Table, filled, is_key, parsed, refused, table
from automoe.config.schema import Config, MeshConfig
from automoe.errors import ConfigError
from automoe.launch import hardware, rules_adapters

MODULES = (hardware, recompute, rules, rules_adapters, rules_kernels, rules_model, rules_parallel, rules_settings)
SETTING = re.compile(r"(?<![\w.{])((?:[a-z_]+\.)+[a-z_]\w*)=")


class Fact(int):
    """A fact of any name, and facts inside it."""

    def __getattr__(self, name: str) -> Fact:
        return Fact(1)


def check(rows: Table) -> None:
    """Raise unless each name is a key or a fact of a configuration, and each word a value of its key."""
    see = Scope(Config(), resolve_mesh(MeshConfig(dp_shard=1), None), "cpu", Fact())
    for first, second, reason, *remedy in rows:
        for part in parsed(first) + parsed(second):
            with suppress(ZeroDivisionError):
                see(part.number)
            if part.operator in ("==", "!=") and is_key(part.number):
                for value in part.values(see):
                    typed(part.number, value)
        filled(see, reason)
        for key in SETTING.findall(" ".join([reason, *remedy])):
            check_key(key, None)


def rows_in(value: object) -> list[tuple[str, ...]]:
    """The rows of a table, or of several tables in a tuple or a dictionary."""
    if isinstance(value, dict):
        return [row for part in value.values() for row in rows_in(part)]
    if not isinstance(value, tuple):
        return []
    if len(value) > 2 and all(isinstance(cell, str) for cell in value) and any(" " in cell for cell in value):
        return [value]
    return [row for part in value for row in rows_in(part)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_and_word_of_a_table_exists(module: ModuleType) -> None:
    rows = [row for name, value in vars(module).items() if name.isupper() for row in rows_in(value)]
    assert len(rows) > 8
    check(tuple(rows))
    computed = set(re.findall(r"\b(\w+)(?:=|\": )", inspect.getsource(module)))
    assert set(re.findall(r"facts\.(\w+)", str(rows))) <= computed


def test_all_tables_are_checked() -> None:
    assert sum(len(rows_in(value)) for module in MODULES for value in vars(module).values()) > 250


@pytest.mark.parametrize(
    "row",
    [
        "moe.expert == loop | train.compile | no such key",
        "moe.experts == lop | train.compile | no such word",
        "train.compile | train.seq_len % mesh.tq | no such axis",
        "train.compile | lora.rank > 0 | no such number {train.seq}",
        "train.compile | lora.rank > 0 | no such remedy | Set train.complie=false",
        "train.compile lora.rank > 0 | train.compile | no such comparison",
    ],
)
def test_a_mistake_in_a_table_is_found(row: str) -> None:
    with pytest.raises((AttributeError, ConfigError)):
        check(table(row))


@pytest.mark.parametrize("value", range(2, 30))
@pytest.mark.parametrize("axes", [(2, 3), (4, 1), (5, 2)])
def test_numbers_that_are_advised_divide(value: int, axes: tuple[int, int]) -> None:
    cp, tp = axes
    rows = table("train.seq_len % mesh.cp * mesh.tp | | why\nmesh.tp: model.num_layers // mesh.cp % mesh.tp | | why")
    config = Config()
    config.train.seq_len = config.model.num_layers = value
    see = Scope(config, MeshShape(1, 1, 1, cp, tp, 1, 1, 1, 1))
    found = {key: (rule, remedy) for key, _, rule, remedy in refused(see, rows)}
    assert ("train.seq_len" in found) == (value % (cp * tp) != 0) and ("mesh.tp" in found) == (value // cp % tp != 0)
    if "train.seq_len" in found:
        rule, remedy = found["train.seq_len"]
        assert f"cp*tp = {cp}*{tp} = {cp * tp} does not divide {value} ({value} % {cp * tp} = " in rule
        near = [int(number) for number in re.findall(r"\d+", remedy)]
        assert near == [n for n in (value // (cp * tp) * cp * tp, (value // (cp * tp) + 1) * cp * tp) if n]
    if "mesh.tp" in found:
        assert value // cp % int(found["mesh.tp"][1].partition("=")[2]) == 0


def test_settings_of_a_condition_that_the_reason_does_not_show_are_added() -> None:
    rows = table("moe.experts == triton | train.fp8 != off and lora.rank > 1 | it has none ({lora.rank})")
    config = Config()
    config = replace(config, moe=replace(config.moe, experts="triton"), train=replace(config.train, fp8="delayed"))
    config.lora.rank = 4
    ((key, _, rule, remedy),) = refused(Scope(config, config.mesh), rows)
    assert (key, rule) == ("moe.experts", "it has none (4, train.fp8=delayed)")
    assert remedy == "Set moe.experts=grouped_mm, or train.fp8=off, or lora.rank=1"
