"""Classes of transformers, fine-tuned by the command: killed, gone on to the bit, exported. One has a native family."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from automoe.classes.model import TransformersModel
from automoe.config.schema import MoEConfig
from automoe.errors import ConfigError
from automoe.export import export_run
from tests.support.class_models import save_class, tier_config
from tests.support.command import ROOT, TrainCommand
from tests.support.sampling import sample_seed

pytestmark = pytest.mark.faults

TABLE = json.loads((ROOT / "benchmarks" / "results" / "class_tier.json").read_text())["classes"]
# The table is that of the newest transformers.
CLASSES = sorted(name for name, row in TABLE.items() if row.get("tier") == "class" and name in CONFIG_MAPPING)
NATIVE = "deepseek_v4"
SETTINGS = (
    "data=stdlib_chat", "data.tokenizer=byte", "data.max_bytes=100000", "data.on_long=truncate", "data.chat.pack=false",
    "data.document_mask=false", "launch.device=cpu", "observe.report=false", "train.steps=6", "train.seq_len=48",
    "train.global_batch_size=8", "train.micro_batch_size=1", "train.val_every=0", "optim.warmup_steps=2",
    "optim.ema_decay=0.9", "checkpoint.every=2", "mesh.pp=1", "mesh.dp_shard=2", "mesh.dp_replicate=2", "mesh.ep=2",
    "parallel.recompute=full",
)  # fmt: skip


def balance(folder: Path) -> tuple[str, ...]:
    """Settings without a balance loss, for a class that does not give its routers' logits."""
    try:
        TransformersModel(tier_config(folder), MoEConfig(experts="loop", seq_balance_coef=1e-3))
    except ConfigError as error:
        assert error.key == "moe.seq_balance_coef" and error.remedy == "Set moe.seq_balance_coef=0"
        return ("moe.seq_balance_coef=0",)
    return ()


# an indexer and linear attention in every run, and experts by token id; of the others, some
@pytest.mark.parametrize(
    "model_type", dict.fromkeys(["glm5_next", NATIVE, *random.Random(sample_seed()).sample(CLASSES, 8)])
)
def test_a_killed_run_goes_on_to_the_bit_and_is_exported(tmp_path: Path, model_type: str) -> None:
    save_class(model_type, tmp_path / "model")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    settings = (f"model.hf_path={tmp_path / 'model'}", *SETTINGS, *balance(tmp_path / "model"))
    straight = TrainCommand(tmp_path / "straight", settings, cache)
    code, out, err = straight.run()
    assert code == 0, err
    assert "logits equal to" in " ".join(out.split())
    assert ("by transformers' own code; experts by" in out) == (model_type != NATIVE)
    killed = TrainCommand(tmp_path / "killed", settings, cache)
    code, _, err = killed.run(fault="kill:rank=1:at=forward:step=4")
    assert code == 1 and "killed by SIGKILL" in err, err
    code, out, err = killed.run()
    assert code == 0 and "after step 2" in out, err
    assert killed.record() == straight.record()
    exports = [run.run_dir / "hf" for run in (straight, killed)]
    for file in sorted(path.name for path in exports[0].glob("*.safetensors")):
        expected, found = (load_file(folder / file) for folder in exports)
        assert all((found[key] == expected[key]).all() for key in expected) and found.keys() == expected.keys()
    source = json.loads((tmp_path / "model" / "config.json").read_text())
    assert json.loads((exports[1] / "config.json").read_text())["architectures"] == source["architectures"]


def test_preferences_start_at_ln_2_and_are_exported(tmp_path: Path) -> None:
    """The policy is its own reference before the first update, on a mesh too."""
    save_class("flex_olmo", tmp_path / "model")
    settings = [
        "--config-name", "dpo_small", f"model.hf_path={tmp_path / 'model'}", "data=stdlib_preference",
        "data.tokenizer=byte", "train.seq_len=256", "train.steps=3", "train.val_every=0", "mesh.pp=1", "mesh.ep=2",
        "checkpoint=regular", "observe.report=false", "optim.lr=6e-4",
    ]  # fmt: skip
    run = TrainCommand(tmp_path / "run", settings, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    code, out, err = run.run()
    assert code == 0 and "logits equal to" in " ".join(out.split()), err
    losses = [row["loss"] for row in run.record() if "loss" in row]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < losses[0] - 1e-3


@pytest.mark.parametrize("model_type", ["flex_olmo", "glm5_next", NATIVE])
def test_adapters_of_a_class_go_on_to_the_bit_and_leave_alone_or_merged(tmp_path: Path, model_type: str) -> None:
    """Dropout and averages go on, too; both exports are proven by the commands that write them."""
    save_class(model_type, tmp_path / "model")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    adapters = ("lora.rank=8", "lora.dropout=0.25", "lora.export=adapter")
    settings = (f"model.hf_path={tmp_path / 'model'}", *SETTINGS, *adapters)
    straight = TrainCommand(tmp_path / "straight", settings, cache)
    code, out, err = straight.run()
    assert code == 0, err
    assert "LoRA of rank 8" in out and "as peft loads it" in out and "of experts" in out
    killed = TrainCommand(tmp_path / "killed", settings, cache)
    code, _, err = killed.run(fault="kill:rank=1:at=forward:step=4")
    assert code == 1 and "killed by SIGKILL" in err, err
    code, out, err = killed.run()
    assert code == 0 and "after step 2" in out, err
    assert killed.record() == straight.record()
    expected, found = (load_file(run.run_dir / "adapter" / "adapter_model.safetensors") for run in (straight, killed))
    assert found.keys() == expected.keys() and all((found[key] == expected[key]).all() for key in expected)
    written = export_run(killed.run_dir, tmp_path / "merged")
    assert not isinstance(written, str) and written.logits_error is not None and written.logits_error < 1e-5
