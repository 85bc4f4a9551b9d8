"""``automoe eval WHERE --tasks TASK``: run lm-eval-harness tasks on a run or a checkpoint.

automoe eval runs/sft_small --tasks my_task.yaml         # a task file with data on this machine
automoe eval runs/sft_small --tasks tasks/ --limit 100   # all task files of a folder
automoe eval my-model --tasks hellaswag,arc_easy         # harness tasks; downloads their data

The model is loaded through ``transformers``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from automoe.config.paths import user_path
from automoe.errors import (
    AutomoeError,
    ConfigError,
    exit_status,
    import_backend,
    listed,
    number_option,
    one_line,
    say,
)
from automoe.generate import checkpoint_of, load_checkpoint
from automoe.interop.lm_eval import guard_harness, in_time, rehearse
from automoe.observe.metrics import jsonable
from automoe.storage.files import explained, free_name, replace_file

RESULTS = "eval.json"


@exit_status
def main(argv: list[str] | None = None) -> int:
    """Run the lm-eval tasks that ``argv`` names; print their results and write them to a file.

    Returns the exit status: 0 if all tasks ran and every number is finite; 2 after an error.
    """
    parser = argparse.ArgumentParser(
        prog="automoe eval", description="Run tasks of lm-eval-harness on a run or a checkpoint."
    )
    parser.add_argument(
        "where", help="run directory, or a HuggingFace checkpoint such as automoe export writes"
    )
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="A,B",
        help="task files (YAML), folders of them, or names that lm_eval knows",
    )
    parser.add_argument(
        "--num_fewshot",
        "--num-fewshot",
        type=number_option(int, lambda number: number >= 0, "number of examples, 0 or more"),
        metavar="N",
        help="examples before each question",
    )
    parser.add_argument(
        "--batch_size", "--batch-size", type=_rows_at_once, default="1", metavar="N",
        help="rows at once, or auto (default: 1)",
    )  # fmt: skip
    limit = number_option(float, lambda number: 0 < number < math.inf, "number larger than 0")
    parser.add_argument(
        "--limit", type=limit, metavar="N", help="documents per task; below 1, a share of them"
    )
    parser.add_argument(
        "--apply_chat_template",
        "--apply-chat-template",
        action="store_true",
        help="ask through the chat template",
    )
    parser.add_argument(
        "--trust-task-code",
        action="store_true",
        help="run code that task files name: functions of Python files beside them, metrics",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"results as JSON (default: WHERE/{RESULTS}, or the next number)",
    )
    return _evaluate(parser.parse_args(argv))


def _evaluate(args: argparse.Namespace) -> int:
    where = user_path("WHERE", args.where)
    import_backend(
        "lm_eval.models.huggingface",
        "automoe eval",
        "Install lm_eval (pip install '.[eval]' in a clone)",
    )
    from lm_eval.utils import make_table

    guard_harness(args.trust_task_code)
    logger = logging.getLogger("lm_eval")
    logger.handlers = [_Once(args.tasks)]
    logger.propagate = False
    with checkpoint_of(where) as folder:
        _free(where, args.out)  # before the tasks run
        with _failing(args.tasks):
            tasks = load_tasks([spec.strip() for spec in args.tasks.split(",")])
        names = [leaf.task_name for task in tasks for leaf in _leaves(task)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                "--tasks", args.tasks, f"more than one task is called {listed(twice)}", "Rename one"
            )
        scores = evaluate(folder, tasks, args)
    # For a run the checkpoint may be a temporary folder, so record the run itself.
    scores["config"] |= {"model": args.where, "apply_chat_template": args.apply_chat_template}
    print(make_table(scores))
    if scores.get("groups"):
        print(make_table(scores, "groups"))
    with explained(where, "The table above has the numbers"):
        out = _claimed(where, args.out)
        try:
            replace_file(out, json.dumps(jsonable(scores), indent=1, default=str))
        except OSError:
            out.unlink()  # of no bytes
            raise
    print(f"results {out}")
    # The name of a number is METRIC,FILTER; a standard error that was not estimated is N/A.
    numbers = {
        (task, name): value
        for task, values in (scores.get("groups", {}) | scores["results"]).items()
        for name, value in values.items()
        if "," in name and value not in (None, "N/A")
    }
    wrong = [
        f"{task} {name.partition(',')[0]}"
        for (task, name), value in numbers.items()
        if not isinstance(value, int | float) or not math.isfinite(value)
    ]
    wrong += [f"{task} has no number" for task in {*names} - {task for task, _ in numbers}]
    if wrong:
        raise AutomoeError(
            f"the tasks were not all evaluated; not finite: {listed(wrong)}. Look at their data, and at the model's "
            "answers"
        )
    return 0


class _Once(logging.Handler):
    """Log handler that prints a warning of lm-eval only once for each place in its code.

    A warning that a right answer is not among a task's choices raises ``ConfigError``.

    Args:
        tasks: names of the tasks, for the error.
    """

    def __init__(self, tasks: str) -> None:
        super().__init__(logging.WARNING)
        self._tasks = tasks
        self._places: set[tuple[str, int]] = set()

    def handle(self, record: logging.LogRecord) -> bool:
        text = one_line(record.getMessage())
        if "Label index was not in" in text:  # quoted from the harness
            rule = "a right answer is not among the choices"
            raise ConfigError("--tasks", self._tasks, rule, "Correct doc_to_target")
        if (place := (record.pathname, record.lineno)) not in self._places:
            self._places.add(place)
            say(f"warning: lm_eval: {text}")
        return True


def load_tasks(specs: list[str]) -> list[Any]:
    """Load and return tasks and groups of tasks of lm-eval-harness, with their data.

    Args:
        specs: task files (YAML), folders of task files, or names that the harness knows.

    Raises:
        ConfigError: a name is empty or unknown, or a folder has no task files.
    """
    from lm_eval.tasks import TaskManager

    built = []
    for spec in specs:
        path = user_path("--tasks", spec or "nameless.yaml")  # which is no folder to look through
        # The harness's own tasks are thousands of files and take half a minute to read. They are
        # left out if the text looks like a path, which names none of them.
        include = not path.exists() and os.sep not in spec and path.suffix not in (".yaml", ".yml")
        folder = str(path) if path.is_dir() else None
        manager = TaskManager(include_path=folder, include_defaults=include)
        rule, names = "", [str(path)]
        if not spec:
            rule = "a task without a name"
        elif folder:
            names = manager.all_subtasks
            rule = "" if names else "there is no task file in this folder"
        elif path.exists():
            if (group := _group_in(path)) is not None:
                built.append(group)
                continue
        elif spec in manager.all_tasks:
            names = [spec]
        else:
            rule = f"there is no such file or folder (looked from {os.getcwd()}), and no task of lm_eval has that name"
        if rule:
            raise ConfigError("--tasks", spec, rule, "`lm-eval ls tasks` lists tasks by name")
        for name in names:
            loaded = manager.load([name])
            groups = list(loaded.get("groups", {}).values())
            built += groups[:1] or loaded["tasks"].values()
    return built


def _group_in(path: Path) -> Any:
    """Return the lm-eval task group that a YAML file defines; None if it defines a single task.

    The group's tasks are files in the same folder or tasks of the harness.
    """
    from lm_eval.tasks import TaskManager, _yaml_loader

    if "group" not in _yaml_loader.load_yaml(path, resolve_func=False, recursive=False):
        return None
    manager = TaskManager(include_path=str(path.parent), include_defaults=False)
    entries = manager.task_index
    [name] = (
        name for name in manager.all_groups if entries[name].yaml_path.resolve() == path.resolve()
    )
    if any(isinstance(task, str) and task not in entries for task in entries[name].cfg["task"]):
        manager = TaskManager(include_path=str(path.parent))
    return manager.load([name])["groups"][name]


def evaluate(folder: Path, tasks: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run loaded tasks on the checkpoint in ``folder`` and return the results of lm-eval.

    The results have no information about the machine and its git repository.

    Args:
        folder: HuggingFace checkpoint directory.
        tasks: tasks and groups of tasks (``load_tasks``).
        args: parsed command line (few-shot count, batch size, limit, chat template).

    Raises:
        ConfigError: a chat template is requested and the tokenizer has none, or the model's class
            computes padded rows wrongly.
        AutomoeError: the harness, a task file or its data fails.
    """
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = load_checkpoint(folder)
    if args.batch_size != "1" and model.config.model_type == "deepseek_v4":
        raise ConfigError(
            "--batch_size",
            args.batch_size,
            "rows would be padded on the left, and DeepSeek-V4 cuts windows from the start of a row",
            "Leave it out",
        )
    if args.apply_chat_template and tokenizer.chat_template is None:
        raise ConfigError(
            "--apply_chat_template",
            "",
            "its tokenizer has no chat template",
            "Leave it out, or add chat_template.jinja to the folder",
        )
    # A limit is a count of documents, or below 1 a share of them.
    limit = args.limit if args.limit is None or args.limit < 1 else int(args.limit)
    leaves = [leaf for task in tasks for leaf in _leaves(task)]
    fewest = min(len(leaf.eval_docs) for leaf in leaves)
    if limit is not None:
        fewest = min(fewest, limit if limit >= 1 else math.ceil(fewest * limit))
    with _failing(args.tasks):
        # The harness would query pip and the hardware, which takes many seconds.
        evaluator.add_env_info = lambda results: None
        # The harness would run git in the working directory, which may be no repository.
        evaluator.get_git_commit_hash = lambda: None
        run = partial(
            evaluator.simple_evaluate,
            tasks=tasks,
            # The tasks are built already: the manager has nothing to look up.
            task_manager=TaskManager(include_defaults=False),
            num_fewshot=args.num_fewshot,
            batch_size=args.batch_size,
            limit=limit,
            apply_chat_template=args.apply_chat_template,
            log_samples=False,
        )
        rehearse(tokenizer, args.tasks, partial(run, bootstrap_iters=0))
        for leaf in leaves:
            for part in ("apply_filters", "process_results"):
                place = f"--tasks={args.tasks}: {leaf.task_name}: {part}"
                setattr(leaf, part, in_time(place, getattr(leaf, part)))
        scores = run(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch_size),
            # A single document has no standard error; the harness would divide by 0.
            **({"bootstrap_iters": 0} if fewest < 2 else {}),
        )
    return {key: value for key, value in scores.items() if key != "git_hash"}


@contextlib.contextmanager
def _failing(tasks: str) -> Iterator[None]:
    """Context that turns errors of lm-eval, task files or their data into an ``AutomoeError``.

    Args:
        tasks: names of the tasks, for the message.
    """
    try:
        yield
    except AutomoeError:
        raise
    except Exception as error:  # task YAML, templates, functions, files and network raise anything
        why = one_line(f"{type(error).__name__}: {error}")
        raise AutomoeError(
            f"--tasks={tasks}: lm_eval cannot run them ({why}). Files in data_files are looked up from the "
            "working directory; without a network, a task needs its data on this machine"
        ) from error


def _leaves(task: Any) -> list[Any]:
    return task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]


def _free(where: Path, out: str | None) -> Path:
    """Return a path for the results that does not exist yet and can be written.

    Args:
        where: the run or checkpoint directory that is evaluated.
        out: the path to use; None: ``eval.json`` in ``where``, or the next free ``eval.N.json``.

    Raises:
        ConfigError: ``out`` exists, or its folder cannot be written.
    """
    path = user_path("--out", out) if out else where / RESULTS
    rule = ""
    if os.path.lexists(path) and out:
        rule = "it exists, and results are not overwritten"
    elif os.path.lexists(path):
        path = free_name(path, path.stem)
    if not rule and not os.access(path.parent, os.W_OK | os.X_OK):
        rule = "its folder does not exist, or cannot be written"
    if rule:
        raise ConfigError("--out", path, rule, "Name another file")
    return path


def _claimed(where: Path, out: str | None) -> Path:
    """Create an empty results file and return its path, so that no other evaluation takes the path.

    Args:
        where: the run or checkpoint directory that is evaluated.
        out: the path to use; None: ``eval.json`` in ``where``, or the next free ``eval.N.json``.

    Raises:
        ConfigError: ``out`` exists, or its folder cannot be written.
    """
    while True:
        path = _free(where, out)
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path


def _rows_at_once(text: str) -> str:
    if not re.fullmatch(r"auto(:[1-9]\d*)?|0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is neither auto nor a number of rows, 1 or more")
    return text


if __name__ == "__main__":
    sys.exit(main())
