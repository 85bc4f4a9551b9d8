"""``automoe convert``: one checkpoint directory from another, without ranks."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM

from automoe import convert
from automoe.errors import ConfigError
from automoe.hf import save_plan, verify, write
from automoe.hf.keys import INDEX_FILE
from automoe.hf.write import convert_hf
from tests.support.class_models import save_class
from tests.support.hf_models import save_small_hf


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", ["dsv3", "qwen3_moe_tied", "mixtral_odd", "gpt_oss", "llama"])
def test_there_and_back_through_fused_experts(name: str, tmp_path: Path) -> None:
    save_small_hf(name, tmp_path / "in", dtype=torch.bfloat16)
    assert convert.main([str(tmp_path / "in"), "--out", str(tmp_path / "fused"), "--layout", "fused"]) == 0
    assert convert.main([str(tmp_path / "fused"), "--out", str(tmp_path / "back")]) == 0
    before, between, after = (stored(tmp_path / name) for name in ("in", "fused", "back"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and torch.equal(after[key], tensor), key
    assert not any(".experts.0." in key for key in between)
    assert (between.keys() == before.keys()) == (name in ("gpt_oss", "llama"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["flex_olmo", "solar_open"])
def test_a_class_of_transformers_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architecture = type(save_class(name, tmp_path / "in")).__name__
    assert convert.main([str(tmp_path / "in"), "--out", str(tmp_path / "fused"), "--layout", "fused"]) == 0
    assert capsys.readouterr().out.startswith(f"converting {tmp_path / 'in'}: {architecture}, ")
    assert convert.main([str(tmp_path / "fused"), "--out", str(tmp_path / "back")]) == 0
    before, between, after = (stored(tmp_path / name) for name in ("in", "fused", "back"))
    assert before.keys() == after.keys() != between.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_what_transformers_fuses_is_what_is_fused_here(tmp_path: Path) -> None:
    save_small_hf("qwen3_moe", tmp_path / "in")
    save_small_hf("qwen3_moe", tmp_path / "theirs", save_original_format=False)
    convert_hf(tmp_path / "in", tmp_path / "ours", layout="fused")
    theirs, ours = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


def test_casts_parameters_and_leaves_buffers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_hf("dsv3", tmp_path / "in")
    assert convert.main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"converting {tmp_path / 'in'}: deepseek_v3, ")
    said = " ".join(" ".join(rest).split())
    assert said.startswith(f"saved {tmp_path / 'out'} ") and " in 1 file; " in said
    assert "equal bit for bit to the weights in the files' dtypes, logits equal to" in said
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    wide = tuple(DeepseekV3ForCausalLM._keep_in_fp32_modules_strict)  # selection biases, and routers since 5.24
    assert "e_score_correction_bias" in wide
    for key, tensor in before.items():
        wanted = tensor if key.endswith(wide) else tensor.bfloat16()
        assert after[key].dtype == wanted.dtype and torch.equal(after[key], wanted), key
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_fp8_and_back(tmp_path: Path) -> None:
    save_small_hf("dsv3", tmp_path / "in", dtype=torch.bfloat16)
    convert_hf(tmp_path / "in", tmp_path / "fp8", encoding="fp8", max_shard_bytes=20_000)
    convert_hf(tmp_path / "fp8", tmp_path / "back", "float32")
    codes, before, after = (stored(tmp_path / name) for name in ("fp8", "in", "back"))
    index = json.loads((tmp_path / "fp8" / INDEX_FILE).read_text())
    assert index["weight_map"].keys() == codes.keys() and len(set(index["weight_map"].values())) > 2
    assert before.keys() == after.keys()
    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert codes[key].dtype == torch.float8_e4m3fn
    assert torch.equal(after[key], codes[key].float() * codes[key + "_scale_inv"])
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert's tensor is read when it is written, not its layer's."""
    save_small_hf("qwen3_moe", tmp_path / "in", save_original_format=False)
    events: list[str] = []
    real_read, real_write = save_plan._read, save_plan.write_files

    def read(job, *args, **named):
        events.append(f"read {job.key}")
        region = real_read(job, *args, **named)
        assert region.numel() == torch.Size(job.target.shape).numel()
        return region

    def write(contents, tensors):
        contents = list(contents)
        keys = [key for _, tensors_of_file in contents for key in tensors_of_file]

        def asked_for():
            for key, tensor in zip(keys, tensors, strict=True):
                events.append(f"write {key}")
                yield tensor

        real_write(contents, asked_for())

    monkeypatch.setattr(save_plan, "_read", read)
    monkeypatch.setattr(save_plan, "write_files", write)
    convert_hf(tmp_path / "in", tmp_path / "out")
    written = 2 * len(stored(tmp_path / "out"))
    assert not any(event.startswith("write ") for event in events[written:])  # read back and compared
    events = events[:written]
    for one, other in zip(events[::2], events[1::2], strict=True):
        assert one.removeprefix("read ") == other.removeprefix("write ")


def test_settings_and_tokenizer_go_along(tmp_path: Path) -> None:
    save_small_hf("qwen3_moe", tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "additional_chat_templates").mkdir()
    (tmp_path / "in" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    convert_hf(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"temperature": 0.6}'
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_errors_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_hf("qwen3_moe", tmp_path / "in")
    for out, options, says in (
        ("in", [], "exists"),
        ("out", ["--max-shard-gb", "x"], "--max-shard-gb: x is not a finite number larger than 0"),
        ("out", ["--max-shard-gb", "inf"], "--max-shard-gb: inf is not a finite number larger than 0"),
        ("out", ["--fp8", "--layout", "fused"], "quantized experts are stored as they are published"),
    ):
        with contextlib.suppress(SystemExit):  # argparse's
            assert convert.main([str(tmp_path / "in"), "--out", str(tmp_path / out), *options]) == 2
        assert says in capsys.readouterr().err
    for wrong in ({"dtype": "float16"}, {"layout": "fuse"}):
        with pytest.raises(ConfigError, match="=".join(*wrong.items())):
            convert_hf(tmp_path / "in", tmp_path / "out", **wrong)
    for source, says in ((tmp_path / "none", "no such directory"), (tmp_path, "there is no config.json in it")):
        assert convert.main([str(source), "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.startswith(f"error: SRC={source}: {says}. Name a HuggingFace")
    weights = tmp_path / "in" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert convert.main([str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 2
    assert "truncated" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


def test_a_config_that_says_something_else_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_hf("qwen3_moe", tmp_path / "in")
    real = write.write_settings

    def other_angles(target: Path, *args, **given: object) -> None:
        real(target, *args, **given)
        config = json.loads((target / "config.json").read_text())
        rope = {"rope_type": "default", "rope_theta": 10.0}
        (target / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))

    monkeypatch.setattr(write, "write_settings", other_angles)
    assert convert.main([str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 2
    assert "model.rope.theta=10.0, and the model has 10000.0" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("options", [[], ["--layout", "fused"], ["--fp8"]])
def test_a_number_that_the_disk_changed_is_found(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_hf("qwen3_moe", tmp_path / "in")
    real = write.write_settings
    fused, expert = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.3.up_proj.weight"
    key = fused if "fused" in options else expert

    def damaging(target: Path, *args, **given: object) -> None:
        real(target, *args, **given)
        tensors = load_file(target / "model.safetensors")
        tensors[key].view(-1)[7] = 100.0
        save_file(tensors, target / "model.safetensors")

    monkeypatch.setattr(write, "write_settings", damaging)
    assert convert.main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), *options]) == 2
    said = capsys.readouterr().err
    assert key in said and "1 of " in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


def test_what_transformers_does_not_load_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("a package is missing")

    save_small_hf("qwen3_moe", tmp_path / "in")
    monkeypatch.setattr(verify, "_run_transformers", broken)
    assert convert.main([str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 2
    assert "does not reload in transformers: ImportError: a package" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]
