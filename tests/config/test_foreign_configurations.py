"""YAML and paths that would hang, fill memory or mislead: refused with file and key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from automoe import cli
from automoe.config.compose import compose_config
from automoe.config.data_schema import DataConfig
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.data import corpora
from automoe.data.prepare import open_corpus
from automoe.data.tokenizer import ByteTokenizer
from tests.support.hostile import DEEP, DEEPER, DIGITS, ends_within, refused


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ends_within(60):
        yield


# Configurations
# ---------------------------------------------------------------------------------------------------------------------

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("text", "needles"),
    [
        (BOMB, ["x.yaml", "values once its aliases are expanded"]),
        ("a: &a [*a]\n", ["x.yaml", "nested deeper than 100"]),
        ("a: &a {b: *a}\n", ["x.yaml", "nested deeper than 100"]),
        (f"a: {DEEP}\n", ["x.yaml", "nested deeper than 100"]),
        (f"a: {DEEPER}\n", ["x.yaml", "nested deeper than 100"]),
        (f"peak_flops: {DIGITS}\n", ["x.yaml", "peak_flops is a number of 5,000 digits"]),
        (f"gemm_curve: [1, {DIGITS}]\n", ["x.yaml", "gemm_curve is a number of 5,000 digits"]),
        ("a: 1\n" * 300_000, ["x.yaml", "1,500,000 bytes"]),
        ("peak_flops: .nan\n", ["cluster.peak_flops=nan"]),
        ("memory_bandwidth: .inf\n", ["cluster.memory_bandwidth=inf"]),
        ("peak_flops: 1.0e-300\npeak_flops_fp8: 1.0e+300\n", ["cluster.peak_flops=1e-300"]),
        ("intra_node_bandwidth: 1.0e+308\n", ["cluster.intra_node_bandwidth=1e+308"]),
        ("gpus_per_node: 1000000000000000000000000000000\n", ["cluster.gpus_per_node"]),
        ("gemm_curve: [1.0e-300, 1.0]\n", ["cluster.gemm_curve"]),
        ("constants: {gemm: 1.0e-320}\n", ["cluster.constants"]),
        ("peak_flops: fast\n", ["cluster.peak_flops=fast"]),
        ("name: [1]\n", ["cluster.name"]),
        ("- 1\n", ["--config-name"]),
        ("peak_flops: !!python/object/apply:os.system [touch ran]\n", ["--config-name"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_cluster_file_that_does_harm(text: str, needles: list[str], tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "x.yaml").write_text(text)

    def read() -> None:
        config = compose_config("config", ["cluster=x"], str(tmp_path))
        check_rows(config, number_rows(config))

    refused(read, *needles)
    assert not Path("ran").exists()


@pytest.mark.parametrize("text", [BOMB, f"a: {DEEP}", f"a: {DIGITS}", "a: &a [*a]", "a: 2020-99-99", "a: *b"])
def test_a_run_directory_whose_configuration_does_harm(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert cli.main(["export", str(tmp_path), "--out", str(tmp_path / "hf")]) == 2


# Paths
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "key",
    "data.path data.tokenizer data.chat.template model.hf_path run_dir checkpoint.resume recipe observe.samples "
    "moe.record_routing moe.replay_routing".split(),
)
@pytest.mark.parametrize("path", ["~nobody9/x", "a" * 300 + "/x", "a/" * 3000, "x\\0y"])
def test_paths_of_no_file(key: str, path: str) -> None:
    value = path.replace("\\0", "\0")
    refused(lambda: compose_config(overrides=[f"{key}='{value}'"]), f"{key}=")


def test_a_path_with_brackets_is_looked_for_before_it_is_a_pattern(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("v[2]", "v2", "*"):
        Path(name).mkdir()
        Path(name, "c.jsonl").write_text(json.dumps({"text": name * 3}) + "\n")
    for path, read in (
        ("v[2]/c.jsonl", ["v[2]"]),
        ("v[2]/*.jsonl", ["v[2]"]),
        ("v[2]", ["v[2]"]),
        ("*/c.jsonl", ["*"]),
        ("v?/c.jsonl", ["v2"]),
        ("[v]*/c.jsonl", ["v2", "v[2]"]),
    ):
        data = DataConfig(kind="jsonl", path=path)
        validate(Config(data=data), 1, "cpu")
        assert sorted(file.parent.name for file in corpora.find_files(data).values()) == read
        assert len(open_corpus(data, ByteTokenizer()).lengths) == len(read)


@pytest.mark.parametrize("command", ["generate", "eval", "convert", "export"])
@pytest.mark.parametrize("path", ["~nobody9/x", "a" * 300])
def test_commands_take_no_path_of_no_file(command: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"generate": ["hi"], "eval": ["--tasks", "x"]}.get(command, ["--out", "y"])
    assert cli.main([command, path, *more]) == 2
    assert "~nobody9 has no home directory" in (said := capsys.readouterr().err) or "255 bytes" in said
