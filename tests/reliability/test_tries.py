"""What a stranger's folders and task files made the commands do: hang, end in code lines, or run the stranger's code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.class_models import save_class
from tests.support.hf_models import save_small_hf
from tests.support.tries import Tries, tries

pytestmark = pytest.mark.faults

CODE = "import os\nopen(os.environ['CANARY'], 'w').close()\n\ndef f(*args, **options):\n    return 1\n\ngenerate = f\n"
NEST = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
RUN = (
    "train.steps=2", "train.seq_len=64", "train.global_batch_size=4", "train.micro_batch_size=1", "train.val_every=0",
    "data.document_mask=false", "data.chat.pack=false", "mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "launch.device=cpu",
    "launch.num_ranks=1", "observe.report=false", "checkpoint.export_hf=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tries]:
    folder = tmp_path_factory.mktemp("tries")
    for name, save in (("flex_olmo", save_class), ("qwen3_moe", save_small_hf)):
        save(name, folder / name, **({} if save is save_class else {"other_sizes": {"vocab_size": 304}}))
        save_tokenizer(folder / name, "chatml")
    write_chat(folder / "c.jsonl", [messages(f"What is {n}?", f"It is {n * n}.") for n in range(40)])
    (folder / "q.jsonl").write_text("".join(json.dumps({"q": f"What is {n}?", "t": n % 2}) + "\n" for n in range(4)))
    env = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tries(folder, os.environ | env) as started:
        yield started


def command(attempt: Tries, name: str, folder: Path) -> tuple[str, tuple[object, ...]]:
    run = (f"model.hf_path={folder}", "data=chat", f"data.path={attempt.folder / 'c.jsonl'}", *RUN)
    words: dict[str, tuple[object, ...]] = {
        "train": (f"run_dir={folder}.run", *run),
        "plan": run,
        "verify": run,
        "convert": (folder, "--out", f"{folder}.out"),
        "generate": (folder, "--max-new-tokens", "3", "Who?"),
    }
    return f"automoe.{name}", words[name]


# Any class of transformers
# ---------------------------------------------------------------------------------------------------------------------

SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("train", {"num_hidden_layers": 9999}, "num_hidden_layers=9999, and its files hold"),
    ("convert", {"num_hidden_layers": 9999}, "num_hidden_layers=9999, and its files hold"),
    ("train", {"num_experts": 10**9}, "1,000,000,000 layers or experts"),
    ("plan", {"num_experts": 10**5}, "100,000 layers or experts"),
    ("train", {"initializer_range": float("nan")}, "initializer_range is NaN"),
    ("train", {"initializer_range": -1.0}, "cannot initialise"),
    ("generate", {"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
    ("generate", {"num_experts_per_tok": 9}, "selected index k out of range"),
    ("generate", {"num_experts_per_tok": -1}, "selected index k out of range"),
    (
        "generate",
        {"model_type": "granitemoe_swa"},
        "tensors of GraniteMoeSWAForCausalLM: model.layers.0.block_sparse_moe",
    ),
    ("generate", {"model_type": "bert"}, "tensors of BertLMHeadModel"),
    ("generate", {"intermediate_size": 10**9}, "numbers, and its files hold"),
    ("generate", {"head_dim": 10**8, "num_hidden_layers": 1}, "numbers, and its files hold"),
    ("train", {"is_causal": False}, "is_causal=False"),
    ("train", {"vocab_size": 2**64}, "which is out of range for any model"),
    ("train", {"configuration_files": ["config.4.0.0.json"]}, "configuration_files"),
    ("train", {"_attn_implementation_internal": "who/kernel"}, "_attn_implementation_internal='who/kernel'"),
    ("convert", {"dtype": "os"}, "dtype='os', which must be the name of a dtype"),
]


@pytest.mark.parametrize(("name", "change", "needle"), SETTINGS, ids=lambda value: str(value)[:40])
def test_a_class_whose_settings_do_harm(
    attempt: Tries, name: str, change: dict[str, Any], needle: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(attempt.folder / "flex_olmo", tmp_path / "hf"))
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | change))
    module, words = command(attempt, name, folder)
    found = attempt(module, *words)
    assert found.outcome == "refused" and needle in found.said, found


def test_a_class_without_files_that_takes_for_ever_to_make(attempt: Tries, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(attempt.folder / "flex_olmo", tmp_path / "hf"))
    (folder / "model.safetensors").unlink()
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | {"num_hidden_layers": 9999}))
    module, words = command(attempt, "train", folder)
    found = attempt(module, *words, "model.random_weights=true")
    assert found.outcome == "refused" and "config.json: its class of transformers: this takes more than" in found.said


# Odd options
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        (("generate", "HF", "--temperature", "1e-320", "Who?"), "1e-320 is not a temperature"),
        (("plan", "html=/dev/full"), "html=/dev/full: it is a device"),
        (("plan", "html=PIPE"), "it is a FIFO"),
        (("plan", "search=true", "world=100000000000000000000"), "must be a number of ranks, at most"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_that_do_harm(attempt: Tries, words: tuple[str, ...], needle: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    given = [word.replace("HF", str(attempt.folder / "qwen3_moe")) for word in words[1:]]
    found = attempt(f"automoe.{words[0]}", *(word.replace("PIPE", str(tmp_path / "pipe")) for word in given))
    assert found.outcome == "refused" and needle in found.said, found


# Task files of lm-eval-harness
# ---------------------------------------------------------------------------------------------------------------------

TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: ["a", "b"]
doc_to_target: "{{t}}"
metric_list: [{metric: acc}]
"""
LONG = TASK.replace("multiple_choice", "generate_until").replace('doc_to_choice: ["a", "b"]\n', "")
LONG = LONG.replace("metric: acc", "metric: exact_match")


def asks(text: str) -> str:
    return TASK.replace('"{{q}}"', text)


TASKS: dict[str, tuple[str, str]] = {
    "function": (asks("!function own.f"), "!function 'own.f'"),
    "function of a library": (asks("!function os.system"), "!function 'os.system'"),
    "class": ("task: mine\nclass: !function own.f\n", "class: 'own.f'"),
    "metric": (TASK.replace("metric: acc", "metric: FOLDER/own.py"), "own.py"),
    "metric of the Hub": (TASK.replace("metric: acc", "metric: who/what, hf_evaluate: true"), "metric: 'who/what'"),
    "generation": (LONG + "generation_kwargs: {custom_generate: FOLDER/cg, trust_remote_code: true}\n", "custom_generate"),
    "pickle": (TASK.replace("path: json", "path: pandas").replace("DATA", "FOLDER/x.pkl"), "error: --tasks="),
    "included": ("include: own.yaml\n" + TASK, "!function 'own.f'"),
    "globals": (asks("\"{{ cycler.__init__.__globals__.os.system('touch $CANARY') }}\""), "SecurityError"),
    "endless": (asks(f'"{NEST}"'), "a template of a task takes more than"),
    "power": (asks('"{{ 9 ** (9 ** 9) }}"'), "a template of a task takes more than"),
    "memory": (asks("\"{{ 'a' * 9000000000 }}\""), "takes more than 2.1 GB of memory"),
    "expression": (
        LONG + "generation_kwargs: {max_gen_toks: 30, until: ['zzzz']}\nfilter_list: [{name: f, filter: [{function: regex, "
        "regex_pattern: '(.?.?.?)*(.?.?)*(.*)*(.*)*(.*)*(.*)*zq$'}, {function: take_first}]}]\n",
        "apply_filters takes more than",
    ),
    "a pipe": ("include: pipe.yaml\n" + TASK, "is a FIFO, not a file"),
    "repeats": (TASK + "repeats: 1000000000\n", "takes more than"),
}  # fmt: skip


class Trap:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def write_task(attempt: Tries, folder: Path, text: str) -> Path:
    (folder / "cg" / "custom_generate").mkdir(parents=True)
    for name in ("own.py", "cg/custom_generate/generate.py"):
        (folder / name).write_text(CODE)
    (folder / "own.yaml").write_text("process_docs: !function own.f\n")
    (folder / "x.pkl").write_bytes(pickle.dumps(Trap(attempt.canary)))
    os.mkfifo(folder / "pipe.yaml")
    text = text.replace("DATA", str(attempt.folder / "q.jsonl")).replace("FOLDER", str(folder))
    (folder / "task.yml").write_text(text.replace("$CANARY", str(attempt.canary)))
    return folder / "task.yml"


@pytest.mark.parametrize("name", TASKS)
def test_a_task_file_that_does_harm(attempt: Tries, name: str, tmp_path: Path) -> None:
    text, needle = TASKS[name]
    task = write_task(attempt, tmp_path, text)
    found = attempt("automoe.eval", attempt.folder / "qwen3_moe", "--tasks", task, "--out", tmp_path / "out")
    assert found.outcome == "refused" and needle in found.said, found


def test_a_task_file_that_is_trusted_runs_and_one_without_code_needs_no_trust(attempt: Tries, tmp_path: Path) -> None:
    text = TASK.replace('"{{t}}"', "!function own.f")
    task = write_task(attempt, tmp_path, text)
    where = attempt.folder / "qwen3_moe"
    found = attempt("automoe.eval", where, "--tasks", task, "--trust-task-code", "--out", tmp_path / "a")
    assert found.outcome == "code" and found.status == 0, found
    task.write_text(TASK.replace("task: mine", "task: 5").replace("DATA", str(attempt.folder / "q.jsonl")))
    found = attempt("automoe.eval", where, "--tasks", task, "--out", tmp_path / "b")
    assert found.outcome == "done" and json.loads((tmp_path / "b").read_text())["results"]["5"], found


def test_a_checkpoint_whose_tokenizer_or_template_never_ends_is_not_evaluated(attempt: Tries, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(attempt.folder / "qwen3_moe", tmp_path / "hf"))
    task = write_task(attempt, tmp_path / "task", TASK.replace('"{{q}}"', f'"{"q" * 60}!"'))
    spec = json.loads((folder / "tokenizer.json").read_text())
    endless = {"type": "Split", "pattern": {"Regex": "(q+)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(spec | {"pre_tokenizer": endless}))
    found = attempt("automoe.eval", folder, "--tasks", task, "--out", tmp_path / "out")
    assert found.outcome == "refused" and "the tokenizer, of" in found.said, found
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "chat_template.jinja").write_text(NEST)
    found = attempt("automoe.eval", folder, "--tasks", task, "--apply_chat_template", "--out", tmp_path / "out")
    assert found.outcome == "refused" and "the checkpoint's chat template: this takes more than" in found.said, found
