"""A trained checkpoint learns longer rows by YaRN (``model.rope.extends``): what is computed, written and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from automoe.config.compose import Arguments
from automoe.config.frozen import dump_config, parse_config
from automoe.config.schema import Config, ModelConfig, MoEConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.hf.read import load_hf
from automoe.hf.write import to_hf
from automoe.launch.prepare import check_here, compose
from automoe.model.decoder import Decoder
from automoe.model.init import default_dtype
from automoe.optim.schedule import learning_rate
from automoe.verify.run import make_runnable
from tests.support.class_models import AllInFloat64
from tests.support.configurations import quick_config
from tests.support.hf_models import save_small_hf
from tests.support.wrappers import save_wrapper

FACTOR = 8
DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 1.0}


def extended(path: Path, *overrides: str) -> Config:
    words = [f"model.hf_path={path}", "experiment=yarn", "data=benchmark", "launch.device=cpu", *overrides]
    return compose(Arguments(overrides=words))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("qwen3_moe", {}),
        pytest.param("qwen3_moe", {"attention_factor": 1.1, "beta_fast": 16.0}, marks=pytest.mark.exhaustive),
        ("dsv3", {}),
        pytest.param("dsv3", {"mscale": 0.7, "mscale_all_dim": 0.5}, marks=pytest.mark.exhaustive),
        pytest.param("dsv3", {"mscale": 0.0, "mscale_all_dim": 0.0}, marks=pytest.mark.exhaustive),
        pytest.param("glm4_moe_lite", {}, marks=pytest.mark.exhaustive),
        pytest.param("glm4_moe", {"truncate": False}, marks=pytest.mark.exhaustive),
        pytest.param("llama", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_checkpoint_is_stretched_as_transformers_stretches_it(
    name: str, numbers: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"max_position_embeddings": 64, "num_hidden_layers": 2, "rope_scaling": None, "rope_theta": 500.0}
    save_small_hf(name, tmp_path / "in", other_sizes=sizes)
    given = [f"model.rope.{key}={str(value).lower()}" for key, value in numbers.items()]
    model = extended(tmp_path / "in", f"model.rope.factor={FACTOR}", "train.seq_len=512", *given).model
    stretched = AutoConfig.from_pretrained(tmp_path / "in")
    unsaid = DEEPSEEK if "q_lora_rank" in vars(stretched) else {}  # as published
    stated = {"rope_type": "yarn", "factor": float(FACTOR), "original_max_position_embeddings": 64} | unsaid | numbers
    stretched.rope_parameters = stretched.rope_parameters | stated
    stretched.max_position_embeddings = 64 * FACTOR
    tokens = torch.randint(90, (2, 300), generator=torch.Generator().manual_seed(1))
    with AllInFloat64(), default_dtype(torch.float64), torch.no_grad():

        def logits(folder: Path, **options: Any) -> torch.Tensor:
            options |= {"dtype": torch.float64, "experts_implementation": "eager"}
            return AutoModelForCausalLM.from_pretrained(folder, **options)(tokens).logits

        ours = Decoder(model, MoEConfig(experts="loop")).eval()
        load_hf(ours, tmp_path / "in")
        wanted, plain, found = logits(tmp_path / "in", config=stretched), logits(tmp_path / "in"), ours(tokens)
        assert (found - wanted).norm() < 1e-12 * wanted.norm() < (wanted - plain).norm()
    to_hf(ours, tmp_path / "out")
    with AllInFloat64(), torch.no_grad():
        assert (logits(tmp_path / "out") - wanted).norm() < 1e-12 * wanted.norm()
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["max_position_embeddings"] == 64 * FACTOR
    # What it is trained on with next: its config.json says all of it.
    words = [f"model.hf_path={tmp_path / 'out'}", "data=benchmark", "train.seq_len=512", "launch.device=cpu"]
    again = compose(Arguments(overrides=words)).model
    assert not again.rope.extends and again.rope.scaling == "yarn" and again.rope.factor == FACTOR


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_small_hf("qwen3_moe", folder, other_sizes={"max_position_embeddings": 64, "num_hidden_layers": 2})
    return folder


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.rope.factor=1"], r"model.rope.factor=1.0: rows of 1 \* 64 = 64 tokens .* Set model.rope.factor=2"),
        (["model.rope.factor=1.5", "model.rope.original_seq_len=32"], r"1.5 \* 32 = 48 .* Set model.rope.factor=4, or"),
        (["model.random_weights=true"], "model.rope.extends=True: .* neither model.upcycle nor model.random_weights"),
        (["model.rope.extends=false", "model.rope={factor: 2}"], r"rope.factor=2: .* model.rope.extends=true"),
        (["model.rope.scaling=llama3"], "model.rope.scaling=llama3: only YaRN extends a checkpoint"),
        (["model.rope.original_seq_len=31"], r"original_seq_len=31: .*max_position_embeddings=64. Set .*=64, or"),
        (["model.rope.original_seq_len=65"], "original_seq_len=65: .*max_position_embeddings=64"),
        (["model.rope.scaling=none"], r"Set model.rope.scaling=yarn"),
        (["model.rope.mscale_all_dim=1"], "a qwen3_moe checkpoint can only have 0.0"),
        (
            ["lora.rank=4", "lora.export=adapter"],
            "lora.export=adapter: peft loads an adapter onto .* Set lora.export=merged",
        ),
    ],
)
def test_what_cannot_be_stretched_is_refused_before_training(overrides: list[str], says: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        config = extended(checkpoint, *overrides)
        validate(config, 4, "cpu")
        check_here(config)


def test_all_of_what_config_json_says_is_taken_for_trained_unless_said(tmp_path: Path) -> None:
    save_small_hf("qwen3_moe", tmp_path, other_sizes={"max_position_embeddings": 8192, "num_hidden_layers": 1})
    assert extended(tmp_path, "model.rope.original_seq_len=0").model.rope.original_seq_len == 8192
    head = "defaults: [base, model: small_qwen3_moe, _self_]\ndata: {kind: benchmark}\n"
    for length, said in ((8192, ""), (4096, ", original_seq_len: 4096")):  # 4096 without a checkpoint, too
        rope = "{extends: true, scaling: yarn, factor: 3" + said + "}"
        words = [f"model.hf_path={tmp_path}", f"model.rope={rope}", "data=benchmark"]
        (tmp_path / "mine.yaml").write_text(head + f"model: {{hf_path: {tmp_path}, rope: {rope}}}\n")
        for config in (compose(Arguments(overrides=words)), compose(Arguments("mine", str(tmp_path)))):
            assert config.model.rope.original_seq_len == length
            assert parse_config(dump_config(config)).model.rope == config.model.rope
    assert ModelConfig().rope.original_seq_len == compose(Arguments()).model.rope.original_seq_len == 4096


def test_verify_takes_an_extension_from_random_weights(checkpoint: Path) -> None:
    here, _, _ = make_runnable(extended(checkpoint, "mesh.dp_shard=2", "mesh.ep=2"))
    assert here.model.hf_path is None and here.model.rope.scaling == "yarn" and not here.model.rope.extends


def test_half_of_what_config_json_says_is_taken_for_trained(checkpoint: Path) -> None:
    config = extended(checkpoint, "model.rope.original_seq_len=32", "lora.rank=4", "lora.export=merged")
    validate(config, 4, "cpu")
    assert config.model.rope.original_seq_len == 32


def test_checkpoints_that_are_scaled_already_wrapped_or_not_there(tmp_path: Path) -> None:
    save_small_hf("gpt_oss", tmp_path / "yarn", other_sizes={"num_hidden_layers": 1})
    with pytest.raises(ConfigError, match=r"model.rope.extends=True: .* are scaled already: yarn, factor="):
        extended(tmp_path / "yarn")
    save_wrapper("qwen3_5_moe", tmp_path / "wrapped")
    with pytest.raises(ConfigError, match="are set in a wrapper's config.json. Leave it out"):
        extended(tmp_path / "wrapped")
    with pytest.raises(ConfigError, match="model.rope.extends=True: .* Set model.hf_path=DIR"):
        validate(quick_config("config", ["experiment=yarn"]), 4, "cpu")


@pytest.mark.parametrize(("phase", "length", "rows"), [("32k", 32768, 1920), ("128k", 131072, 480)])
def test_deepseek_v3s_phases_are_those_of_its_paper(phase: str, length: int, rows: int) -> None:
    """arXiv 2412.19437, section 4.3: both with scale 40, from 4,096; alpha 1, beta 32; 1,000 steps at 7.3e-6."""
    config = quick_config("dsv3_671b", [f"experiment=dsv3_extension_{phase}"])
    train, rope = config.train, config.model.rope
    assert (train.seq_len, train.global_batch_size, train.steps) == (length, rows, 1000)
    assert {learning_rate(config.optim, step, train.steps) for step in (0, 1, 500, 999)} == {7.3e-6}
    assert rope.extends == (phase == "32k")
    assert (rope.scaling, rope.factor, rope.original_seq_len, rope.beta_slow, rope.beta_fast) == (
        "yarn",
        40,
        4096,
        1,
        32,
    )
