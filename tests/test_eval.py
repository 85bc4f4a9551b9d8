"""``automoe eval``: the harness's numbers are those that ``transformers`` gives by hand, and what cannot be run says so."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from automoe import cli
from automoe import eval as eval_module
from automoe.eval import load_tasks
from tests.support.chat import save_tokenizer
from tests.support.class_models import save_class
from tests.support.hf_models import save_small_hf

CHOICES = [" a", " b", " the answer", "?"]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: brier_score}}]
"""


def question(n: int) -> str:
    return f"{n}: the answer {chr(97 + n)} is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in ``hf``, and a task of 20 questions in ``tasks/letters.yaml``."""
    folder = tmp_path_factory.mktemp("eval")
    save_small_hf("qwen3_moe", folder / "hf", other_sizes={"vocab_size": 304})
    save_tokenizer(folder / "hf", "chatml")
    (folder / "tasks").mkdir()
    docs = [{"question": question(n), "choices": CHOICES, "answer": n % 4} for n in range(20)]
    (folder / "letters.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "tasks" / "letters.yaml").write_text(TASK.format(name="letters", data=folder / "letters.jsonl"))
    return folder


def by_hand(folder: Path, chat: bool, count: int) -> tuple[float, float]:
    """The share of questions whose right choice is the likeliest, and the mean square distance to certainty of it.

    A choice is as likely as the product of the probabilities of its tokens, the second number among the choices alone.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    right, distance = 0, 0.0
    for n in range(count):
        prompt = question(n)
        if chat:
            prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        asked = tokenizer(prompt)["input_ids"]
        scores = []
        for choice in CHOICES:
            ids = torch.tensor([asked + tokenizer(choice)["input_ids"]])
            with torch.no_grad():
                logs = model(ids).logits[0, len(asked) - 1 : -1].log_softmax(-1)
            scores.append(float(logs.gather(1, ids[0, len(asked) :, None]).sum()))
        right += scores.index(max(scores)) == n % 4
        shares = torch.tensor(scores).softmax(0)
        shares[n % 4] -= 1
        distance += float(shares.square().sum())
    return right / count, distance / count


def evaluate(folder: Path, *words: str) -> int:
    return cli.main(["eval", str(folder / "hf"), *words])


def test_accuracy_is_what_transformers_gives_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(folder, "--tasks", str(folder / "tasks" / "letters.yaml"), "--batch_size", "3") == 0
    found = json.loads((folder / "hf" / "eval.json").read_text())
    accuracy = found["results"]["letters"]["acc,none"]
    assert 0 < accuracy < 1
    assert (accuracy, found["results"]["letters"]["brier_score,none"]) == pytest.approx(by_hand(folder, False, 20))
    assert found["n-samples"]["letters"]["effective"] == 20 and found["config"]["model"] == str(folder / "hf")
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    error = (accuracy * (1 - accuracy) / 19) ** 0.5
    [row] = [row for row in rows if row[4] == "acc"]
    assert row[0] == "letters" and row[6::2] == [f"{accuracy:.4f}", f"{error:.4f}"]
    assert lines[-1] == f"results {folder / 'hf' / 'eval.json'}"


@pytest.mark.exhaustive
def test_a_class_without_a_native_family_is_evaluated(folder: Path, tmp_path: Path) -> None:
    save_class("flex_olmo", tmp_path / "hf", vocab_size=304)
    save_tokenizer(tmp_path / "hf", "chatml")
    assert evaluate(tmp_path, "--tasks", str(folder / "tasks" / "letters.yaml"), "--limit", "6") == 0
    found = json.loads((tmp_path / "hf" / "eval.json").read_text())["results"]["letters"]
    assert (found["acc,none"], found["brier_score,none"]) == pytest.approx(by_hand(tmp_path, False, 6))


def test_rows_that_a_class_would_compute_wrongly_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_class("deepseek_v4", tmp_path / "hf", vocab_size=304)
    save_tokenizer(tmp_path / "hf", "chatml")
    task = ("--tasks", str(folder / "tasks" / "letters.yaml"), "--limit", "2")
    assert evaluate(tmp_path, *task, "--batch_size", "auto") == 2
    assert "--batch_size=auto: rows would be padded on the left" in capsys.readouterr().err
    assert evaluate(tmp_path, *task) == 0


def test_a_folder_of_tasks_asked_through_the_chat_template(folder: Path) -> None:
    out = folder / "chat.json"
    words = ("--tasks", str(folder / "tasks"), "--limit", "10", "--apply_chat_template", "--out", str(out))
    assert evaluate(folder, *words) == 0
    found = json.loads(out.read_text())
    numbers = found["results"]["letters"]
    assert (numbers["acc,none"], numbers["brier_score,none"]) == pytest.approx(by_hand(folder, True, 10))
    assert found["n-samples"]["letters"]["effective"] == 10 and found["config"]["apply_chat_template"]


def test_one_document_has_no_standard_error(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # which is in no git repository
    assert evaluate(folder, "--tasks", str(folder / "tasks"), "--limit", "1", "--out", str(folder / "one.json")) == 0
    said = capfd.readouterr()
    assert "N/A" in said.out and "git" not in said.err


def test_results_that_have_no_place_are_printed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of --out goes while the tasks run."""
    run = eval_module.evaluate

    def gone(*args: Any) -> Any:
        scores = run(*args)
        (tmp_path / "gone").rmdir()
        return scores

    (tmp_path / "gone").mkdir()
    out = tmp_path / "gone" / "out.json"
    monkeypatch.setattr(eval_module, "evaluate", gone)
    assert evaluate(folder, "--tasks", str(folder / "tasks"), "--limit", "2", "--out", str(out)) == 2
    said = capsys.readouterr()
    assert "|letters" in said.out and f"error: --out={out}: its folder does not exist" in said.err


def test_results_of_another_evaluation_stay(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended while the tasks ran."""
    run = eval_module.evaluate
    results = folder / "hf" / "eval.json"
    results.unlink(missing_ok=True)

    def overtaken(*args: Any) -> Any:
        results.write_text("theirs")
        return run(*args)

    monkeypatch.setattr(eval_module, "evaluate", overtaken)
    assert evaluate(folder, "--tasks", str(folder / "tasks"), "--limit", "2") == 0
    assert results.read_text() == "theirs" and "letters" in (folder / "hf" / "eval.1.json").read_text()


def test_evaluations_that_end_together_have_files_of_their_own(tmp_path: Path) -> None:
    """A link that leads nowhere has a name too."""
    (tmp_path / "eval.json").symlink_to("nowhere")
    with ThreadPoolExecutor(8) as pool:
        claimed = [*pool.map(lambda _: eval_module._claimed(tmp_path, None), range(64))]
    assert len({*claimed}) == 64 and (tmp_path / "eval.json") not in claimed
    assert all(path.stat().st_size == 0 for path in claimed)


def test_a_group_in_a_file_of_its_own(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / "letters.jsonl"))
    group = {"group": "both", "task": ["one", "two"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "both.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in group.items()))
    [both] = load_tasks([str(tmp_path / "both.yaml")])
    assert both.name == "both" and sorted(both.child_names) == ["one", "two"]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--num_fewshot", "-1", "-1 is not a number of examples"),
        ("--num_fewshot", "some", "some is not a number"),
        ("--batch_size", "0", "0 is neither auto nor a number of rows"),
        ("--batch_size", "-4", "-4 is neither auto nor a number of rows"),
        ("--batch_size", "autoo", "autoo is neither auto nor a number of rows"),
    ],
)
def test_counts_below_the_least(capsys: pytest.CaptureFixture[str], option: str, value: str, says: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "nowhere", "--tasks", "a", option, value])
    assert says in capsys.readouterr().err


def test_a_number_that_is_not_finite_is_no_success(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TASK.format(name="nothing", data=folder / "letters.jsonl") + "process_results: !function own.nothing\n"
    (tmp_path / "own.py").write_text("def nothing(doc, results):\n    return {'acc': float('nan')}\n")
    (tmp_path / "nothing.yaml").write_text(text)
    out = tmp_path / "out.json"
    words = ("--tasks", str(tmp_path / "nothing.yaml"), "--limit", "2", "--out", str(out), "--trust-task-code")
    assert evaluate(folder, *words) == 2
    assert "not finite: nothing acc" in capsys.readouterr().err
    assert json.loads(out.read_text())["results"]["nothing"]["acc,none"] == "NaN"


def test_a_task_without_a_name_is_refused_before_the_working_directory_is_looked_through(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folders may have thousands of files, as an environment's have."""
    from lm_eval.tasks import TaskManager

    looked_through: list[Any] = []

    def begin(self: Any, include_path: Any, original: Any = TaskManager.__init__, **options: Any) -> None:
        looked_through.append(include_path)
        original(self, include_path=include_path, **options)

    monkeypatch.setattr(TaskManager, "__init__", begin)
    assert evaluate(folder, "--tasks", f"{folder / 'tasks' / 'letters.yaml'},") == 2
    assert "a task without a name" in capsys.readouterr().err and looked_through == [None, None]


def test_what_cannot_be_run_says_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(tasks: Path | str, *words: str) -> str:
        assert evaluate(folder, "--tasks", str(tasks), *words) == 2
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured.err

    task = folder / "tasks" / "letters.yaml"
    assert "there is no such file or folder" in refused(tmp_path / "none.yaml")
    assert "there is no task file in this folder" in refused(tmp_path)
    assert "more than one task is called letters" in refused(f"{task},{task}")
    (tmp_path / "wrong.yaml").write_text(
        task.read_text().replace("answer\n", "anser\n").replace(", {metric: brier_score}", "")
    )
    out = str(tmp_path / "wrong.json")
    assert "a right answer is not among the choices" in refused(tmp_path / "wrong.yaml", "--limit", "2", "--out", out)
    (tmp_path / "there.json").write_text("kept")
    assert "results are not overwritten" in refused(task, "--out", str(tmp_path / "there.json"))
    assert (tmp_path / "there.json").read_text() == "kept"
    assert "its folder does not exist" in refused(task, "--out", str(tmp_path / "nowhere" / "out.json"))
    (tmp_path / "gone.yaml").write_text(TASK.format(name="gone", data=tmp_path / "gone.jsonl"))
    assert "gone.jsonl" in refused(tmp_path / "gone.yaml")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    hub = TASK.replace("dataset_path: json", "dataset_path: nobody/nothing").format(name="hub", data="x")
    (tmp_path / "hub.yaml").write_text(hub)
    said = refused(tmp_path / "hub.yaml")
    assert "nobody/nothing" in said and "without a network, a task needs its data on this machine" in said
    (folder / "hf" / "chat_template.jinja").rename(tmp_path / "aside")
    assert "no chat template" in refused(task, "--apply_chat_template")
    (tmp_path / "aside").rename(folder / "hf" / "chat_template.jinja")
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "Install lm_eval" in refused(task)
