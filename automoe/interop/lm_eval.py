"""Guards around lm-evaluation-harness: what a task file may run, with limits of time and memory.

A task file of lm_eval is code: it names functions of Python files, metrics and data that the
harness imports or unpickles, and its templates run in a plain Jinja environment. Unless the user
trusts them, task files may only hold data here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any, TypeVar

import yaml

from automoe.errors import ConfigError, DataError
from automoe.storage import guarded
from automoe.storage.foreign import brief, compose_yaml, open_inside

T = TypeVar("T")
# Keys by which a task file names code, or a file that the harness reads unchecked.
_CODE_KEYS = {"class", "hf_evaluate", "custom_generate", "unsafe_code", "use_prompt"}


def guard_harness(trusted: bool) -> None:
    """Make lm-evaluation-harness check each task file before reading, and sandbox its templates.

    Files within the harness itself are not checked. Unless ``trusted``, pandas refuses to read
    pickles as well. All this lasts until the process ends.

    Args:
        trusted: allow task files to name code.
    """
    import lm_eval
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils
    from lm_eval.tasks import _factory, _index, _yaml_loader, manager

    plain = utils.env
    utils.env = ImmutableSandboxedEnvironment(undefined=plain.undefined, keep_trailing_newline=True)
    utils.env.filters.update(plain.filters)
    utils.apply_template = in_time("a template of a task", unwrap(utils.apply_template))
    load, harness = unwrap(_yaml_loader.load_yaml), Path(lm_eval.__file__).parent
    pandas = import_module("pandas")  # datasets reads some files with it
    unpickle = unwrap(pandas.read_pickle)

    @wraps(load)
    def checked(path: Any, **options: Any) -> dict[str, Any]:
        file = Path(path).expanduser().resolve()
        if not file.is_relative_to(harness):
            check_task_file(file, trusted)
        return load(file, **options)

    for module in (_yaml_loader, manager, _index, _factory):
        module.load_yaml = checked

    @wraps(unpickle)
    def refused(*_: Any, **__: Any) -> None:
        _refuse("data", "a pickle")

    pandas.read_pickle = unpickle if trusted else refused


def check_task_file(file: Path, trusted: bool) -> None:
    """Check kind and size of a task file and, unless ``trusted``, that it names no code.

    Raises:
        ConfigError: the file names code.
        CheckpointError: the file is a link out of its folder, or not a regular file.
        ValueError: it is too large or too deeply nested.
        OSError: it cannot be read.
        yaml.YAMLError: it is not YAML.
    """
    from lm_eval.api.metrics import mean  # noqa: F401  (fills the registry)
    from lm_eval.api.registry import metric_registry

    with os.fdopen(open_inside(file.parent, file.name), "rb") as stream:
        _, node = compose_yaml(stream.read())

    def look(node: yaml.Node | None) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            named = isinstance(value, yaml.ScalarNode) and value.value
            if key.value in _CODE_KEYS or (key.value == "metric" and named not in metric_registry):
                _refuse(file, f"{key.value}: {brief(named)}")
            look(value)
        for value in node.value if isinstance(node, yaml.SequenceNode) else ():
            look(value)
        if node is not None and node.tag.startswith("!"):
            _refuse(file, f"{node.tag} {brief(node.value)}")

    if not trusted:
        look(node)


def _refuse(file: object, rule: str) -> None:
    raise ConfigError(
        "--tasks",
        file,
        f"it has {rule}: code that would run, or a file that is not checked",
        "If you trust who wrote it, add --trust-task-code",
    )


def rehearse(tokenizer: Any, tasks: str, run: Callable[[Any], Any]) -> None:
    """Run lm-evaluation-harness tasks with a model that guesses, in a limited child process.

    The child's time and memory are limited. So a hostile chat template ends the child with an
    error, before the real evaluation renders it.

    Args:
        tokenizer: tokenizer of the checkpoint, which renders and tokenises prompts.
        tasks: value of ``--tasks``, for an error.
        run: function that evaluates the model it gets, an ``LM`` of the harness.

    Raises:
        DataError: the chat template or the tokenizer takes too long, or too much memory.
    """
    from lm_eval.models.dummy import DummyLM

    def stepped(name: str) -> None:
        answer = getattr(DummyLM, name)

        def step(model: DummyLM, requests: list[Any], *args: Any, **options: Any) -> Any:
            guarded.doing(f"--tasks={tasks}: the checkpoint's chat template")
            for request in requests if name != "apply_chat_template" else ():
                guarded.doing(f"--tasks={tasks}: the tokenizer, of {brief(request.args[0])}")
                tokenizer("".join(text for text in request.args if isinstance(text, str)))
            return answer(model, requests, *args, **options)

        setattr(DummyLM, name, step)

    def work() -> None:
        for stream in (1, 2):  # hide the harness's progress
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        kinds = "loglikelihood loglikelihood_rolling generate_until apply_chat_template"
        for name in kinds.split():
            stepped(name)
        model = DummyLM()
        model.tokenizer = tokenizer
        run(model)

    guarded.guarded(f"--tasks={tasks}: its prompts", work)


def in_time(work_name: str, work: Callable[..., T]) -> Callable[..., T]:
    """Return ``work`` wrapped with limits of time and memory, in this process.

    Beyond 60 seconds of processor time, or half of the machine's memory, a call raises
    ``DataError``. Only Python code is interrupted; native code runs on.

    Args:
        work_name: subject of the error's sentence "... takes more than N seconds".
    """

    def stop(signum: int, frame: object) -> None:
        seconds = guarded.MAX_SECONDS
        raise DataError(
            f"{work_name} takes more than {seconds} seconds of processor time. Correct it"
        )

    @wraps(work)
    def timed(*args: Any, **options: Any) -> T:
        before = signal.signal(signal.SIGPROF, stop)
        # The signal repeats, since Jinja's optimizer swallows errors.
        left = signal.setitimer(signal.ITIMER_PROF, *[guarded.MAX_SECONDS] * 2)
        try:
            with guarded.limited_memory(work_name):
                return work(*args, **options)
        finally:
            signal.setitimer(signal.ITIMER_PROF, *left)
            signal.signal(signal.SIGPROF, before)

    return timed
