"""No command asks the Hub for compiled code: with stand-ins for the packages that would, on a CPU that they would serve."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from automoe.config.shipped import working_directory_last
from automoe.errors import import_backend, without
from tests.support.chat import save_tokenizer
from tests.support.hf_models import save_small_hf
from tests.support.releases import PACKED, needs

# Whoever imports ``kernels``, or is left with bitsandbytes at the end, is written down.
KERNELS = """
import os
with open(os.environ["UNASKED"], "a") as log:
    log.write("kernels\\n")
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *words, **options: (lambda cls: cls)
"""
SITE = """
import atexit, os, sys
def tell():
    if sys.modules.get("bitsandbytes"):
        with open(os.environ["UNASKED"], "a") as log:
            log.write("bitsandbytes\\n")
atexit.register(tell)
"""
RUN = "run_dir=run data=chat data.path=chat.jsonl model.hf_path=hf train.steps=1 train.val_every=0 data.val_fraction=0"
RUN += " train.seq_len=32 train.global_batch_size=4 train.micro_batch_size=1 mesh.pp=1 mesh.ep=2 lora.rank=4"
COMMANDS = {
    "generate": ["generate hf --max-new-tokens 2 Who?"],
    "adapter": [f"train --config-name sft_small {RUN} lora.export=adapter checkpoint.every=1",
                "export run --out out --adapter", "generate run --max-new-tokens 2 Who?"],
    "packed base": [f"train --config-name sft_small {RUN} lora.base=nf4 lora.export=adapter"],
    "folders": ["convert hf --out out", "doctor", "verify mesh.pp=1 mesh.ep=2"],
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "commands",
    [
        pytest.param(one, id=name, marks=needs(PACKED) if name == "packed base" else ())
        for name, one in COMMANDS.items()
    ],
)
def test_no_command_imports_what_fetches_code(tmp_path: Path, commands: list[str]) -> None:
    save_small_hf("qwen3_moe", tmp_path / "hf", other_sizes={"vocab_size": 304})
    save_tokenizer(tmp_path / "hf", "chatml")
    record = '{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}\n'
    (tmp_path / "chat.jsonl").write_text(record * 9)
    site = tmp_path / "site"
    for name, text in {"kernels/__init__.py": KERNELS, "sitecustomize.py": SITE}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / "kernels-0.18.2.dist-info").mkdir()
    (site / "kernels-0.18.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"
    )
    said, log = "", tmp_path / "log"
    environment = os.environ | {"PYTHONPATH": f"{site}:{Path(__file__).parents[1]}", "UNASKED": str(log)}
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-Pm", "automoe", *words.split()],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    assert not log.exists(), log.read_text()
    assert "pip install kernels" not in said


def test_what_is_named_is_imported_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.py").write_text("")
    (tmp_path / "unasked_backend.py").write_text("try:\n    import kernels\nexcept ImportError:\n    kernels = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    with without("kernels", "unasked_backend"):
        for name in ("kernels", "unasked_backend"):
            with pytest.raises(ImportError):
                __import__(name)
        assert import_backend("unasked_backend", "", "").kernels is None
        with working_directory_last():  # as plugins are
            kernels = import_module("kernels")
        assert sys.modules["kernels"] is kernels
    del sys.modules["kernels"], sys.modules["unasked_backend"]
    with without("kernels"), without("kernels"):
        pass
    assert "kernels" not in sys.modules


@pytest.mark.parametrize("folder", ["below_env", "below"])
def test_a_module_of_an_environment_below_the_working_directory_is_not_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Even of one whose name begins as the module's does."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "below.py").write_text("")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / folder)
    before = [*sys.path]
    with working_directory_last():
        import_module("below")
    assert sys.path == before
    with working_directory_last():
        import_module("here")
    assert sys.path == [*before, str(tmp_path)]
    del sys.modules["below"], sys.modules["here"]
