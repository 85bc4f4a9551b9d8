"""Several sources in one sequence of rows: shares, order, resume, validation by source, and what is refused."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from automoe.config.compose import compose_config
from automoe.config.data_schema import DataConfig, SourceConfig, sources_of
from automoe.config.schema import Config
from automoe.config.validate import validate as check
from automoe.data.loader import Loader
from automoe.data.mixture import Mixture
from automoe.errors import BackendError, ConfigError, DataError
from automoe.training import validate

FIELDS = ("tokens", "labels", "positions", "doc_ids")


@settings(deadline=None)
@example([27, 63.359375, 1.703125, 45, 13.375], 5427, 5427, 145)
@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.integers(0, 30_000),
    st.integers(1, 300),
)
def test_any_stretch_of_rows_has_every_sources_share_in_its_order(weights, seed, first, count):
    mixture = Mixture(weights, seed)
    sources, rows = mixture.rows(first, count)
    before, _ = mixture.rows(0, first + 1)
    for source, share in enumerate(np.array(weights) / sum(weights)):
        mine = rows[sources == source]
        assert (mine == (before[:-1] == source).sum() + np.arange(len(mine))).all(), "each row once, in order"
        assert abs(len(mine) - share * count) <= max(2, 2 + 2 * share * (len(weights) - 2))
    middle = count // 2
    assert (mixture.rows(first + middle, count - middle)[0] == sources[middle:]).all(), "no state"


def test_the_order_of_sources_never_changes():
    """A checkpoint's place in the data means nothing if another version mixes otherwise."""
    assert Mixture([2, 1, 1], 7).rows(10**9, 12)[0].tolist() == ORDER
    assert Mixture([2, 1, 1], 8).rows(10**9, 12)[0].tolist() != ORDER


ORDER = [1, 0, 2, 0, 1, 0, 0, 2, 0, 1, 2, 0]


@pytest.fixture
def config(tmp_path, library_texts, monkeypatch) -> Config:
    """Three sources of unlike sizes: about 20, 40 and 60 rows of 64 tokens an epoch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = Config()
    config.train.seq_len, config.train.global_batch_size = 64, 8
    config.data.kind, config.data.val_fraction = "text", 0.2
    for number, name in enumerate(("code", "web", "books")):
        (tmp_path / name).mkdir()
        for place, text in enumerate(library_texts[10 * number : 10 * number + 10]):
            (tmp_path / name / f"{place}.txt").write_text(text[: 130 * (number + 1)], encoding="utf-8")
    config.data.sources = [
        SourceConfig(str(tmp_path / "code"), weight=2.0),
        SourceConfig(str(tmp_path / "web"), weight=1.0),
        SourceConfig(str(tmp_path / "books" / "*.txt"), name="books", weight=1.0),
    ]
    return config


def alone(config: Config, source: int) -> Config:
    return replace(config, data=sources_of(config.data)[source][2])


def steps(config: Config, n: int, dp_size: int = 1, state: dict | None = None) -> tuple[dict[str, torch.Tensor], dict]:
    loaders = [Loader(config, rank, dp_size) for rank in range(dp_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    batches = [loader.next_step() for _ in range(n) for loader in loaders]
    return {name: torch.cat([getattr(batch, name) for batch in batches]) for name in FIELDS}, loaders[0].state_dict()


def test_another_order_of_sources_is_refused(config):
    """Their names and weights may be equal, and rows differ."""
    _, state = steps(config, 2)
    unnamed = {key: value for key, value in state["fingerprint"].items() if key != "data.sources"}
    steps(config, 1, state=state | {"fingerprint": unnamed})  # of a checkpoint before 0.27
    config.data.sources[:2] = reversed(config.data.sources[:2])
    with pytest.raises(DataError, match=r"data changed.*: data\.sources was \[.*code', .*web', .*is \[.*web', .*code'"):
        steps(config, 1, state=state)


def test_rows_are_those_of_each_source_alone_by_weight(config):
    mixed, _ = steps(config, 50)
    sources, rows = Mixture([2, 1, 1], config.train.seed).rows(0, 400)
    for source in range(3):
        assert abs((sources == source).sum() - (200, 100, 100)[source]) <= 1
        single = alone(config, source)
        single.train.global_batch_size = int((sources == source).sum())
        own, _ = steps(single, 1)
        single.train.global_batch_size = 8
        for name in FIELDS:
            assert torch.equal(mixed[name][sources == source], own[name]), "through several epochs, each its own"


@pytest.mark.parametrize(("dp_before", "dp_after"), [(1, 1), (1, 4), (4, 2)])
def test_a_mixture_resumed_in_the_middle_is_one_that_was_not(config, dp_before, dp_after):
    whole, end = steps(config, 30)
    _, state = steps(config, 13, dp_before)
    rest, state = steps(config, 17, dp_after, state)
    assert all(torch.equal(whole[name][13 * 8 :], rest[name]) for name in FIELDS) and state == end


def test_what_changed_of_which_source_is_said(config):
    _, state = steps(config, 2)
    config.data.sources[0].weight = 3.0
    with pytest.raises(
        DataError, match=r"books: weight was 0\.25, is 0\.2; code: weight was 0\.5, is 0\.6; web: weight"
    ):
        steps(config, 1, state=state)
    config.data.sources[0].weight = 2.0
    Path(config.data.sources[1].path, "3.txt").write_text("another text of other words")
    with pytest.raises(
        DataError, match=r"cannot continue from it.*: web: content was \w+, is \w+; web: text_bytes was"
    ):
        steps(config, 1, state=state)


def test_a_step_names_the_documents_of_all_sources(config):
    loader = Loader(config, 0, 2)
    loader.next_step()
    first, last, documents = loader.last_batch()
    assert (first, last) == (0, 7)
    assert {Path(name).parent.name for name in documents} == {"code", "web", "books"}


def test_validation_of_a_source_is_that_of_the_source_alone(config):
    loader = Loader(config, 0, 2)
    assert loader.names == ("code", "web", "books") and loader.weights == [0.5, 0.25, 0.25]
    for source in range(3):
        single = Loader(alone(config, source), 0, 2)
        pairs = list(zip(loader.batches("validation", 9, source), single.batches("validation", 9), strict=True))
        assert pairs and all(torch.equal(a.tokens, b.tokens) and a.num_bytes == b.num_bytes for a, b in pairs)


def test_validation_loss_by_source_and_of_the_mixture(config, monkeypatch):
    loader = Loader(config, 0, 1)
    sums = [(300.0, 100, 250.0), (20.0, 10, 30.0), (0.0, 0, 0.0)]  # the last has no label
    given_sums = iter(dict(zip(("nats", "count", "bytes"), of_one, strict=True)) for of_one in sums)
    monkeypatch.setattr(validate, "_validation_sums", lambda *_: next(given_sums))
    record = validate.validate(config, SimpleNamespace(loss=None), loader, None, torch.device("cpu"))
    assert record.keys() == {"val_loss", "val_perplexity", "val_bits_per_byte", "val_loss.code", "val_loss.web"}
    assert record["val_perplexity"] == math.exp(record["val_loss"])
    assert (record["val_loss.code"], record["val_loss.web"]) == (3.0, 2.0)
    assert record["val_loss"] == pytest.approx((0.5 * 3 + 0.25 * 2) / 0.75)
    bytes_a_token = (0.5 * 2.5 + 0.25 * 3) / 0.75
    assert record["val_bits_per_byte"] == pytest.approx(record["val_loss"] / math.log(2) / bytes_a_token)


def test_sources_on_a_command_line(tmp_path):
    for name in ("a.jsonl.gz", "b.txt"):
        (tmp_path / name).write_text("x")
    sources = f"data.sources=[{{path: {tmp_path}/a.jsonl.gz, weight: 3, kind: jsonl}}, {{path: {tmp_path}/b.txt}}]"
    config = compose_config("config", [sources, "data=text"])
    found = sources_of(config.data)
    assert [(name, weight, one.kind) for name, weight, one in found] == [("a", 3.0, "jsonl"), ("b", 1.0, "text")]
    assert check(config, 4, "cpu")
    assert sources_of(DataConfig()) == [("", 1.0, DataConfig())]


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ([{"path": "a"}, {"path": "b/a.txt"}], "they are called a, a"),
        (
            [{"path": "automoe"}, {"path": ".", "name": "x", "weight": 0.0}],
            "x: weight=0.0: a share of the rows, larger than 0",
        ),
        ([{"path": ".", "name": "x", "kind": "csv"}], "x: kind=csv is not known"),
        ([{"name": "x"}], "x: data.kind=text reads files, and no path is given"),
        ([{"path": "/nowhere/x.txt"}], "x: nothing there: /nowhere/x.txt"),
        ([{"path": ".", "name": "x", "split": "test"}], "x: split: this is for data sets of the Hub"),
        ([{"path": ".", "name": "x", "format": "alpaca"}], "x: format, keys and roles are for conversations"),
        ([{"path": ".", "name": "x", "kind": "stdlib"}], "x: data.path is set and data.kind=stdlib does not read it"),
    ],
)
def test_sources_that_cannot_be_mixed(sources, says):
    config = compose_config("config", ["data=text"])
    config.data.sources = [SourceConfig(**source) for source in sources]
    with pytest.raises(ConfigError, match="data.sources") as caught:
        check(config, 4, "cpu")
    assert says in caught.value.rule


# Data sets that `datasets` keeps -------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> Path:
    import datasets

    made = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(50)], "id": list(range(50))})
    order = made.shuffle(seed=0)  # rows in another order than the files have them
    splits = datasets.DatasetDict({"train": order.select(range(40)), "test": order.select(range(40, 50))})
    splits.save_to_disk(tmp_path / "saved", num_shards={"train": 3, "test": 1})
    return tmp_path / "saved"


def test_a_saved_data_set_is_read_by_split(saved):
    import datasets

    from automoe.data.corpora import find_files, read_documents

    for split in ("train", "test"):
        data = DataConfig(kind="hub", path=str(saved), split=split)
        expected = datasets.load_from_disk(str(saved))[split]["text"]
        assert [one.text for one in read_documents(data, find_files(data).values())] == list(expected)
    data = DataConfig(kind="hub", path=str(saved / "test"), text_key="body")
    with pytest.raises(DataError, match=r"\.arrow: no column 'body'; this file has id, text\. Set data\.text_key"):
        list(read_documents(data, find_files(data).values()))
    with pytest.raises(DataError, match=r"data\.split=train\[:5%\] is a part of a split"):
        find_files(DataConfig(kind="hub", path=str(saved), split="train[:5%]"))
    with pytest.raises(DataError, match=r"no split 'dev'; its splits are train, test\. Set data\.split"):
        find_files(DataConfig(kind="hub", path=str(saved), split="dev"))


def test_a_hub_data_set_without_datasets_says_what_to_install(saved, monkeypatch):
    from automoe.data.corpora import find_files

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BackendError, match=r"data\.path=.*saved: datasets does not import .*pip install datasets, or"):
        find_files(DataConfig(kind="hub", path=str(saved)))


def test_without_a_network_the_way_around_is_said(monkeypatch):
    from automoe.data.corpora import find_files

    for module in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError,
        match=r"some-org/some-data: nothing there \(looked from /.*HF_HUB_OFFLINE is set.*save_to_disk\(DIR\).*data\.path=DIR",
    ):
        find_files(DataConfig(kind="hub", path="some-org/some-data"))
