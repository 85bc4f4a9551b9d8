"""What an error of files tells its reader to do is done, on a copy: a run starts then, and no file is lost by it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.config.test_remedies import choices
from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.command import TINY
from tests.support.hf_models import save_small_hf
from tests.support.tries import Found, Tries, tries

pytestmark = pytest.mark.faults

ONE = ("train.steps=1", "optim.warmup_steps=0", "mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "launch.num_ranks=1")
WORDS = "some words of a text that is as long as a row\n"


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tries]:
    folder = tmp_path_factory.mktemp("remedies")
    save_small_hf("qwen3_moe", folder / "hf", other_sizes={"vocab_size": 304})
    save_tokenizer(folder / "hf", "chatml")
    with tries(folder, os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}) as started:
        yield started


def train(attempt: Tries, folder: Path, *overrides: str) -> Found:
    return attempt("automoe.train", f"run_dir={folder / 'run'}", *TINY, *ONE, *overrides)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file() and "run" not in file.parts}


def sources(folder: Path, name: str, content: bytes | str) -> Path:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / "data" / name


def other_key(folder: Path) -> list[str]:
    lines = "".join(json.dumps({"body": f"{n} {WORDS * 9}"}) + "\n" for n in range(20))
    return ["data=jsonl", f"data.path={sources(folder, 'a.jsonl', lines)}"]


def long_records(folder: Path) -> list[str]:
    lines = "".join(json.dumps({"text": f"{n} {WORDS * (n % 9)}"}) + "\n" for n in range(20))
    return ["data=jsonl", f"data.path={sources(folder, 'a.jsonl', lines)}", "data.on_long=error"]


def two_formats(folder: Path) -> list[str]:
    lines = "".join(json.dumps({"text": f"{n} {WORDS * 9}"}) + "\n" for n in range(20))
    sources(folder, "b.parquet", b"PAR1")
    return ["data=jsonl", f"data.path={sources(folder, 'a.jsonl', lines).parent}"]


def equal_documents(folder: Path) -> list[str]:
    path = sources(folder, "a.jsonl", (json.dumps({"text": WORDS * 20}) + "\n") * 20)
    return ["data=jsonl", f"data.path={path}", "train.val_every=1"]


def no_template(folder: Path) -> list[str]:
    save_tokenizer(folder / "tokenizer", None)
    path = write_chat(folder / "c.jsonl", [messages("Who?", f"I, {n}.") for n in range(20)])
    tokenizer = f"data.tokenizer={folder / 'tokenizer'}"
    return ["data=chat", "train.seq_len=64", f"data.path={path}", tokenizer, "model.vocab_size=320"]


def other_role(folder: Path) -> list[str]:
    turns = [{"role": "critic", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    (folder / "c.jsonl").write_text(
        "".join(json.dumps({"messages": [*turns, *messages(f"{n}", "I.")]}) + "\n" for n in range(20))
    )
    return [*CHAT, f"data.path={folder / 'c.jsonl'}"]


def other_name(folder: Path) -> list[str]:
    (folder / "c.jsonl").write_text("".join(json.dumps({"talk": messages(f"{n}?", "I.")}) + "\n" for n in range(20)))
    return [*CHAT, f"data.path={folder / 'c.jsonl'}"]


CHAT = ("data=chat", "data.tokenizer=byte", "train.seq_len=64", "data.chat.template=plain")


# what is wrong: how to make it, and what the reader fills in
CASES: dict[str, tuple[Callable[[Path], list[str]], dict[str, str]]] = {
    "key": (other_key, {"data.text_key": "body"}),
    "long": (long_records, {}),
    "formats": (two_formats, {}),
    "validation": (equal_documents, {}),
    "template": (no_template, {"FILE": "chat_template.jinja"}),
    "role": (other_role, {}),
    "name": (other_name, {"NAME": "talk"}),
}


def carried_out(said: str, filled: dict[str, str]) -> list[list[str]]:
    """Return the overrides of each way out of an error."""
    if keys := [key for key in filled if key in said and "." in key]:
        return [[f"{key}={filled[key]}" for key in keys]]
    for name, value in filled.items():
        said = said.replace(name, value)
    advice = re.search(r"\. (Set|Name|Add|Raise|Shorten) .*", said)
    assert advice is not None, said
    return choices(advice[0][2:].replace("'", ""))


@pytest.mark.parametrize("case", CASES)
def test_a_run_starts_once_the_remedy_is_carried_out(attempt: Tries, case: str, tmp_path: Path) -> None:
    make, filled = CASES[case]
    given = make(tmp_path)
    refused = train(attempt, tmp_path, *given)
    assert refused.outcome == "refused", refused
    before = contents(tmp_path)
    ways = carried_out(" ".join(refused.said.split()), filled)
    assert ways, refused.said
    for way in ways:
        words = [*given, *way]
        for _ in range(3):  # behind an error there may be another one
            found = train(attempt, tmp_path, *words)
            if found.outcome == "done":
                break
            words += carried_out(" ".join(found.said.split()), filled)[0]
        assert found.outcome == "done", (words, refused.said, found.said)
        shutil.rmtree(tmp_path / "run")
    assert before.items() <= contents(tmp_path).items()
