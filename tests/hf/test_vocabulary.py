"""A vocabulary that grows: new rows are the mean of the old on every mesh, as ``transformers`` resizes by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_mesh_cases import MESHES, config_for, stored, world_size
from safetensors.torch import load_file, save_file

import automoe
from automoe.config.compose import Arguments
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, LoraConfig, MeshConfig, ModelConfig, MoEConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.export import export_run
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.peft import to_peft
from automoe.hf.read import load_hf
from automoe.hf.shards import Parts
from automoe.hf.upcycle import upcycled
from automoe.hf.write import convert_hf, to_hf
from automoe.launch.prepare import check_here, compose, settle
from automoe.model.init import default_dtype, initialize, reset_buffers
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_decoder, build_parts
from automoe.run.weights import load_or_initialize
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole
from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.class_models import AllInFloat64, save_class
from tests.support.command import TrainCommand
from tests.support.hf_models import save_small_hf
from tests.support.wrappers import save_wrapper

ROWS = 96  # of the checkpoints
TOKENS = torch.arange(90, 114).view(2, 12)  # old and new


def grown(folder: Path, mesh: MeshConfig, rows: int, dtype: str = "float32") -> Parts:
    """The checkpoint on a mesh, in a model with more rows; nothing may be left unread."""
    config = config_for(folder, mesh)
    config = replace(config, model=replace(config.model, vocab_size=rows), train=replace(config.train, dtype=dtype))
    if mesh == MESHES["one"]:
        parts = {0: build_decoder(config.model, config.moe, getattr(torch, dtype))}
    else:
        parts = build_parts(config, build_meshes(resolve_mesh(mesh, None), torch.device("cpu")))
    allocate(parts, torch.device("cpu"))
    for part in parts.values():
        for parameter in part.parameters():
            parameter.data.fill_(float("nan"))
    load_hf(parts, folder)
    return parts


def ends(folder: Path, mesh: MeshConfig, rows: int) -> dict[str, torch.Tensor]:
    """Embedding and head of this rank's stages, whole."""
    parts = named_parameters(grown(folder, mesh, rows))
    return {name: whole(one).clone() for name, one in parts.items() if one.dim() == 2 and rows in whole(one).shape}


def resized(folder: Path, rows: int) -> Any:
    """``transformers``' model in float64, with rows added by hand."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    known = model.config.vocab_size
    model.resize_token_embeddings(rows, mean_resizing=False)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.weight.data[known:] = module.weight.data[:known].mean(0)
    return model.eval()


@pytest.mark.parametrize(("name", "rows"), [("qwen3_moe", 112), ("qwen3_moe_tied", 117), ("dsv3", 100)])
def test_new_rows_are_the_mean_as_in_transformers(name: str, rows: int, tmp_path: Path) -> None:
    save_small_hf(name, tmp_path / "source")
    with default_dtype(torch.float64):
        [model] = grown(tmp_path / "source", MESHES["one"], rows, "float64").values()
    tokens = TOKENS.clamp(max=rows - 1)
    with AllInFloat64(), torch.no_grad():
        theirs = resized(tmp_path / "source", rows)(tokens).logits
        assert (model.eval()(tokens) - theirs).norm() < 1e-12 * theirs.norm()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mesh", ["ep_shard2", "pp2", "tp2", "tp2_dp2_ep2_ep_shard2"])
def test_bits_of_new_rows_are_those_of_one_process(mesh: str, tied: bool, tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("qwen3_moe_tied" if tied else "qwen3_moe", tmp_path / "source")
    expected = ends(tmp_path / "source", MESHES["one"], 118)
    for of_rank in ranks.run(ends, world_size(MESHES[mesh]), tmp_path / "source", MESHES[mesh], 118):
        for name, found in of_rank.items():
            assert torch.equal(found, expected["embed_tokens.weight" if tied else name]), name


def test_copies_of_a_module_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    save_small_hf("dsv3", tmp_path / "plain")
    modules = replace(model_config_from_hf(tmp_path / "plain"), random_weights=True, num_mtp_layers=1)
    model = build_decoder(modules, MoEConfig(experts="loop"), torch.float32)
    model.to_empty(device="cpu")
    reset_buffers(model)
    initialize(model, 0.05, seed=4)
    to_hf(model, tmp_path / "source", verify=False)
    larger = build_decoder(replace(modules, vocab_size=120), MoEConfig(experts="loop"), torch.float32)
    larger.to_empty(device="cpu")
    assert "24 new rows" in str(load_hf(larger, tmp_path / "source"))
    expected = model.embed_tokens.weight
    assert torch.equal(larger.embed_tokens.weight[:ROWS], expected)
    assert torch.equal(larger.embed_tokens.weight[ROWS:], expected.double().mean(0).float().expand(24, -1))
    file = tmp_path / "source/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.4.embed_tokens.weight"][ROWS - 1, 3] += 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.4\.embed_tokens\.weight differs"):
        load_hf(larger, tmp_path / "source")


def test_new_rows_of_a_table_of_token_ids_are_experts_in_turn(tmp_path: Path) -> None:
    save_small_hf("dsv4", tmp_path / "source")
    before = {key: table for key, table in stored(tmp_path / "source").items() if key.endswith("tid2eid")}
    config = replace(model_config_from_hf(tmp_path / "source"), vocab_size=ROWS + 13)
    larger = build_decoder(config, MoEConfig(experts="loop"), torch.float32)
    allocate({0: larger}, torch.device("cpu"))
    said = str(load_hf(larger, tmp_path / "source"))
    assert f"the mean of its {ROWS}, tables of token ids give them experts in turn" in said
    tables = [buffer for name, buffer in larger.named_buffers() if name.endswith("tid2eid")]
    places = torch.arange((ROWS + 13) * config.num_experts_per_token) % config.num_experts
    assert len(tables) == len(before) > 0
    for old, found in zip(before.values(), tables, strict=True):
        assert torch.equal(found[:ROWS], old) and torch.equal(found[ROWS:].flatten(), places[old.numel() :])


@pytest.mark.parametrize("name", ["quantized", "upcycled"])
def test_codes_and_dense_checkpoints_grow_too(name: str, tmp_path: Path) -> None:
    save_small_hf("dsv3" if name == "quantized" else "qwen3", tmp_path / "plain")
    source, keys = tmp_path / "plain", None
    before = stored(source)
    if name == "quantized":
        source = tmp_path / "fp8"
        convert_hf(tmp_path / "plain", source, encoding="fp8")
        before = stored(source)
        model = model_config_from_hf(source)
    else:
        model, keys = upcycled(source, 4, 2)
        model = replace(model, upcycle=True)
    parts = build_decoder(replace(model, vocab_size=130), MoEConfig(experts="loop"), torch.float32)
    parts.to_empty(device="cpu")
    load_hf(parts, source, keys=keys)
    to_hf(parts, tmp_path / "out", dtype="float32")  # compared with transformers
    for key, found in stored(tmp_path / "out").items():
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            old = before[key].float()
            assert torch.equal(found, torch.cat((old, old.double().mean(0).float().expand(130 - len(old), -1))))


def leave(source: Path, out: Path, mesh: MeshConfig, tokenizer: str) -> str:
    """Export a grown model with the larger tokenizer; transformers computes its logits."""
    written = to_hf(grown(source, mesh, 304), out, tokenizer=tokenizer)
    return str(written.logits_error)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_an_export_has_the_new_rows_and_the_tokenizer(name: str, tmp_path: Path, ranks: RankPool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, out = tmp_path / "source", tmp_path / "out"
    save_small_hf(name, source)
    save_tokenizer(tmp_path / "larger", "chatml")
    errors = ranks.run(leave, 2, source, out, MESHES["ep_shard2"], str(tmp_path / "larger"))
    assert float(errors[0]) < 1e-5
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64, experts_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == 304 and len(tokenizer) > ROWS
    tokens = torch.tensor([tokenizer("What is this?").input_ids])
    assert tokens.max() >= 0
    with torch.no_grad():
        found, expected = model(tokens % 304).logits, resized(source, 304)(tokens % 304).logits
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert stored(out)["lm_head.weight"].shape[0] == 304


def composed(folder: Path, *overrides: str, ranks: int = 1) -> Config:
    mesh = ["mesh=fsdp", f"launch.num_ranks={ranks}", "launch.device=cpu", "observe.report=false"]
    config = compose(Arguments(overrides=[f"model.hf_path={folder}", "data=stdlib", *mesh, *overrides]))
    check_here(config)
    return config


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    save_small_hf("qwen3_moe", folder)
    return folder


def test_what_is_refused_says_what_to_set(small: Path, tmp_path: Path) -> None:
    larger = save_tokenizer(tmp_path / "larger", None)
    with pytest.raises(ConfigError, match="makes ids up to .*, and the embedding ends at 95") as caught:
        composed(small, f"data.tokenizer={larger}")
    remedy = caught.value.remedy.partition("model.vocab_size=")[2].split()[0]
    grown = ["run_dir=" + str(tmp_path / "run"), f"data.tokenizer={larger}", f"model.vocab_size={remedy}"]
    assert composed(small, *grown).model.vocab_size == int(remedy) > 290
    with pytest.raises(ConfigError, match=r"has model\.vocab_size=96 and not 95.*Leave model\.vocab_size= out"):
        composed(small, "model.vocab_size=95")
    with pytest.raises(ConfigError, match=r"an adapter does not hold the new rows.*Set lora\.export=merged"):
        composed(small, *grown, "lora.rank=4", "lora.export=adapter")
    with pytest.raises(ConfigError, match=r"301 % 2 = 1.*Set model\.vocab_size=302, or mesh\.tp=1"):
        composed(small, *grown[:2], "model.vocab_size=301", "mesh.tp=2", ranks=2)


def test_a_configuration_that_was_settled_keeps_its_rows(small: Path) -> None:
    config = composed(small, "model.vocab_size=264", "data.tokenizer=byte")
    assert config.model.vocab_size == 264 and settle(config, ["data=stdlib"]) == config
    unsaid = replace(config, model=ModelConfig(hf_path=str(small)))  # 264 is the default, which nobody asked for
    assert settle(unsaid, ["data=stdlib"]).model.vocab_size == ROWS


def test_rows_in_a_file_beside_the_checkpoint_count(small: Path, tmp_path: Path) -> None:
    larger = save_tokenizer(tmp_path / "larger", None)
    model = f"{{hf_path: {small}, vocab_size: 304}}"
    data = f"data: {{tokenizer: {larger}}}\nrun_dir: {tmp_path / 'run'}\nlaunch: {{num_ranks: 1, device: cpu}}\n"
    (tmp_path / "mine.yaml").write_text(f"defaults: [base, data: stdlib, _self_]\nmodel: {model}\n{data}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/group.yaml").write_text(f"hf_path: {small}\nvocab_size: 304\n")
    (tmp_path / "other.yaml").write_text(f"defaults: [base, data: stdlib, model: group, _self_]\n{data}")

    def rows(name: str, *overrides: str) -> int:
        args = Arguments(config_name=name, config_dir=str(tmp_path), overrides=["data=stdlib", *overrides])
        return compose(args).model.vocab_size

    assert rows("mine") == rows("other") == 304 and rows("mine", "model.vocab_size=400") == 400


def first_ends(config: Config, mesh: MeshConfig) -> tuple[str, dict[str, torch.Tensor]]:
    cpu = torch.device("cpu")
    parts = build_parts(config, build_meshes(resolve_mesh(mesh, None), cpu))
    loaded = load_or_initialize(parts, config, cpu)
    named = named_parameters(parts)
    return str(loaded), {name: whole(named[name]).clone() for name in named if "embed_tokens" in name or "head" in name}


@pytest.mark.parametrize(
    ("name", "rows", "axes"), [("qwen3_moe", 296, "tp2_dp2_ep2_ep_shard2"), ("qwen3_moe_tied", 320, "pp2_dp2_ep2")]
)
def test_new_tokens_start_as_their_pieces(name: str, rows: int, axes: str, tmp_path: Path, ranks: RankPool) -> None:
    """Also those of rows that the checkpoint has; the same bits on every mesh."""
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path / "source", None)
    larger = AutoTokenizer.from_pretrained(tmp_path / "source")
    known = len(larger)
    save_small_hf(name, tmp_path / "source", other_sizes={"vocab_size": rows if rows > known else known})
    assert larger.add_tokens(["<|chair|>", "<|desk|>"], special_tokens=True) == 2
    larger.save_pretrained(tmp_path / "larger")
    settings = [f"run_dir={tmp_path / 'run'}", f"data.tokenizer={tmp_path / 'larger'}", "model.new_rows=pieces"]
    settings += ["model.vocab_size=320"] if rows < 320 else []
    config = composed(tmp_path / "source", *settings)
    before = stored(tmp_path / "source")
    old = AutoTokenizer.from_pretrained(tmp_path / "source")
    [(said, expected)] = ranks.run(first_ends, 1, config, MESHES["one"])
    assert "2 rows start as the mean of the pieces of their tokens" in said
    for name, found in expected.items():
        stored_rows = before["lm_head.weight" if "head" in name else "model.embed_tokens.weight"]
        for row, token in enumerate(("<|chair|>", "<|desk|>"), known):
            pieces = old.encode(token, add_special_tokens=False)
            assert len(pieces) > 2 and old.decode(pieces) == token
            assert torch.allclose(found[row].double(), stored_rows[pieces].double().mean(0), rtol=1e-6, atol=1e-8)
        kept = [row for row in range(len(stored_rows)) if row not in (known, known + 1)]
        assert torch.equal(found[kept], stored_rows[kept].float()), name
    mesh = MESHES[axes]
    for _, of_rank in ranks.run(first_ends, world_size(mesh), config, mesh):
        assert of_rank
        assert all(torch.equal(found, expected[name]) for name, found in of_rank.items())
    for more, says in (
        (["lora.rank=4", "lora.export=adapter"], r"does not hold .*lora\.export=merged"),
        (["model.random_weights=true"], "native families that start from their own weights"),
    ):
        with pytest.raises(ConfigError, match=says):
            composed(tmp_path / "source", *settings, *more)


def test_a_class_is_resized_before(tmp_path: Path) -> None:
    save_class("jetmoe", tmp_path / "source", vocab_size=280)
    rows = model_config_from_hf(tmp_path / "source").vocab_size
    with pytest.raises(ConfigError, match=rf"has {rows}, and a class of transformers .*resize_token_embeddings"):
        composed(tmp_path / "source", f"model.vocab_size={rows + 8}")
    larger = save_tokenizer(tmp_path / "larger", None)
    with pytest.raises(ConfigError, match=rf"ends at {rows - 1}\. Set data\.tokenizer="):
        composed(tmp_path / "source", f"data.tokenizer={larger}")


def test_a_checkpoint_whose_rows_are_not_those_of_its_config_is_refused(small: Path, tmp_path: Path) -> None:
    for file in small.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"vocab_size": 100}))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is \[96, 32\], not \[100, 32\]"):
        grown(tmp_path, MESHES["one"], 112)


def test_an_adapter_of_a_grown_model_is_refused(small: Path, tmp_path: Path) -> None:
    parts = grown(small, MESHES["one"], 112)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=112: .* has 96 rows"):
        to_peft(parts, tmp_path / "adapter", LoraConfig(rank=4))
    assert not (tmp_path / "adapter").exists()


@pytest.mark.filterwarnings("ignore:.*not trained, and copied bit for bit")
def test_a_wrapper_states_its_rows_in_the_text_model(tmp_path: Path) -> None:
    save_wrapper("qwen3_5_moe", tmp_path / "source")
    rows = model_config_from_hf(tmp_path / "source").vocab_size + 24
    to_hf(grown(tmp_path / "source", MESHES["one"], rows), tmp_path / "out")  # compares with transformers
    assert json.loads((tmp_path / "out/config.json").read_text())["text_config"]["vocab_size"] == rows
    assert automoe.from_hf(tmp_path / "out").config.vocab_size == rows


SETTINGS = (
    "train.steps=4", "train.seq_len=64", "train.global_batch_size=8", "train.micro_batch_size=1", "train.val_every=0",
    "optim.warmup_steps=1", "optim.lr=1e-2", "checkpoint.every=2", "observe.report=false", "launch.device=cpu",
    "moe.experts=loop", "data.on_long=error", "data.val_fraction=0", "model.vocab_size=304",
)  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize(
    "more",
    [
        ("mesh.pp=2", "mesh.dp_shard=1", "mesh.ep=1"),
        ("mesh.pp=1", "mesh.dp_shard=2", "mesh.ep=2", "lora.rank=4"),
        (
            "mesh.pp=1",
            "mesh.dp_shard=1",
            "mesh.tp=2",
            "lora.rank=4",
            "train.trainable=[embed_tokens.weight,lm_head.weight]",
        ),
    ],
)
def test_a_killed_run_goes_on_to_the_bit(more: tuple[str, ...], small: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    larger = save_tokenizer(tmp_path / "larger", "chatml")
    path = write_chat(tmp_path / "chats.jsonl", [messages(f"{n}?", f"the answer is {n}") for n in range(64)])
    data = ("data=chat", f"data.path={path}", f"data.tokenizer={larger}")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    settings = (f"model.hf_path={small}", *data, *SETTINGS, *more)
    straight, killed = (TrainCommand(tmp_path / name, settings, cache) for name in ("straight", "killed"))
    code, out, err = straight.run()
    assert code == 0 and "208 new rows of the vocabulary start as the mean of its 96" in out, err
    frozen = "lora.rank=4" in more and "trainable" not in more[-1]
    assert ("are trained and cannot be learned" in out) is frozen, out
    code, _, err = killed.run(fault="kill:rank=1:at=forward:step=4")
    assert code == 1 and "killed by SIGKILL" in err, err
    code, out, err = killed.run()
    assert code == 0 and "after step 2" in out and killed.record() == straight.record(), err
    before, after = stored(small), [stored(run.run_dir / "hf") for run in (straight, killed)]
    assert all(torch.equal(after[1][key], one) for key, one in after[0].items())
    head = after[0]["lm_head.weight"]
    start = torch.cat((before["lm_head.weight"], before["lm_head.weight"].double().mean(0).float().expand(208, -1)))
    assert torch.equal(head, start) is frozen
    model = AutoModelForCausalLM.from_pretrained(killed.run_dir / "hf")
    assert len(model.get_input_embeddings().weight) == 304 and len(AutoTokenizer.from_pretrained(killed.run_dir / "hf"))
    again = export_run(killed.run_dir, tmp_path / "again")
    assert not isinstance(again, str) and again.logits_error is not None
    assert torch.equal(stored(tmp_path / "again")["lm_head.weight"], head)
