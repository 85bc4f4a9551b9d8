"""A folder of peft as ``model.hf_path``: training continues the adapter, or it is merged; both compute what peft does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_mesh_cases import MESHES, mesh_name, world_size
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from automoe.config.compose import Arguments
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.launch.prepare import check_here, compose, settle
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.run.weights import load_or_initialize
from automoe.verify.pool import RankError, RankPool
from automoe.verify.trajectory import named_parameters, whole
from tests.support.chat import save_tokenizer
from tests.support.class_models import AllInFloat64
from tests.support.command import TrainCommand
from tests.support.hf_models import save_small_hf

TOKENS = torch.arange(48).view(2, 24)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CONTINUED = ["lora.rank=4", "lora.alpha=6"]


def save_adapter(folder: Path, name: str = "qwen3_moe", **settings: Any) -> Path:
    """An adapter with random numbers, by peft itself, of a small model beside it."""
    from peft import LoraConfig, get_peft_model

    source = folder / "base"
    if not source.exists():
        save_small_hf(name, source, other_sizes={"vocab_size": 304})
    torch.manual_seed(3)
    asked = {"target_modules": ATTENTION, "target_parameters": EXPERTS, "lora_dropout": 0.0} | settings
    config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **asked)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), config)
    adapted.save_pretrained(folder / "adapter")
    return folder / "adapter"


def theirs(adapter: Path) -> torch.Tensor:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base", dtype=torch.float64)
    base.set_experts_implementation("eager")
    with AllInFloat64(), torch.no_grad():
        return PeftModel.from_pretrained(base, str(adapter)).double().eval()(TOKENS).logits


def settled(adapter: Path | str, *overrides: str) -> Config:
    mesh = ["mesh=fsdp", "launch.num_ranks=1", "launch.device=cpu", "observe.report=false", "moe.experts=loop"]
    arguments = [f"model.hf_path={adapter}", "data=stdlib", "data.tokenizer=byte", "train.dtype=float64", *mesh]
    return compose(Arguments(overrides=[*arguments, *overrides]))


def weights_on(config: Config, mesh: MeshConfig) -> dict[str, torch.Tensor]:
    """What this rank's stages start with, whole, and the line that the run prints."""
    meshes = build_meshes(resolve_mesh(mesh, None), torch.device("cpu"))
    parts = build_parts(config, meshes)
    loaded = load_or_initialize(parts, config, torch.device("cpu"))
    return {name: whole(one).clone() for name, one in named_parameters(parts).items()} | {"said": str(loaded)}


@torch.no_grad()
def ours(config: Config) -> tuple[torch.Tensor, str]:
    meshes = build_meshes(resolve_mesh(MESHES["one"], 1), torch.device("cpu"))
    parts = build_parts(config, meshes)
    loaded = load_or_initialize(parts, config, torch.device("cpu"))
    with AllInFloat64():
        return parts[0].eval()(TOKENS), str(loaded)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "settings", "targets"),
    [
        ("qwen3_moe", {}, None),
        ("qwen3_moe", {"target_parameters": EXPERTS[::-1]}, None),
        (
            "qwen3_moe",
            {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]},
            ["experts.down_proj", "q_proj"],
        ),
        ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[:1]}, ["experts.gate_up_proj"]),
        ("llama", {"target_modules": "all-linear", "target_parameters": None}, None),
    ],
)
def test_logits_are_those_of_peft(
    name: str, settings: dict[str, Any], targets: list[str] | None, tmp_path: Path, ranks: RankPool
) -> None:
    adapter = save_adapter(tmp_path, name, **settings)
    expected = theirs(adapter)
    asked = CONTINUED
    if targets:
        with pytest.raises(ConfigError, match="or rank or alpha differs") as caught:
            settled(adapter, *CONTINUED)
        asked = caught.value.remedy.removeprefix("Set ").partition(" to train it further, or")[0].split()
        assert targets is None or f"lora.targets=[{','.join(targets)}]" in asked
    continued, merged = settled(adapter, *asked), settled(adapter)
    assert continued.model.hf_path == merged.model.hf_path == str(tmp_path / "base")
    for config, says in ((continued, "is trained further"), (merged, "is merged into the weights")):
        [(got, said)] = ranks.run(ours, 1, config)
        assert (got - expected).norm() < 1e-6 * expected.norm(), says  # peft rounds products of adapters to float32
        assert says in said and settle(config, ["data=stdlib"]) == config
    [(plain, _)] = ranks.run(ours, 1, settled(tmp_path / "base"))
    assert (plain - expected).norm() > 1e-2 * expected.norm(), "the adapter has to matter"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", ["tp2_dp2_ep2_etp2", "pp2_dp2_ep2", "dp4_ep2_ep_shard2"])
def test_every_mesh_starts_alike(mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    adapter = save_adapter(tmp_path)
    sizes = MESHES[mesh]
    axes = [f"mesh.{axis}={getattr(sizes, axis)}" for axis in ("pp", "tp", "dp_shard", "ep", "etp")]
    for more in (CONTINUED, []):
        config = settled(adapter, *axes, f"launch.num_ranks={world_size(sizes)}", *more)
        [expected] = ranks.run(weights_on, 1, settled(adapter, *more), MESHES["one"])
        assert "adapter" in str(expected.pop("said"))
        found: set[str] = set()
        for of_rank in ranks.run(weights_on, world_size(sizes), config, sizes):
            assert "adapter" in str(of_rank.pop("said"))
            found |= of_rank.keys()
            for name, one in of_rank.items():
                assert torch.allclose(one, expected[name], rtol=1e-14, atol=1e-16), (mesh_name(sizes), name)
        assert found == expected.keys()


def by_hand(adapter: Path) -> None:
    """The experts' adapters one by one, with an A each for gates and ups, as transformers before 5 had them."""
    file = adapter / "adapter_model.safetensors"
    made, generator = {}, torch.Generator().manual_seed(8)
    for key, one in load_file(file).items():
        if ".experts." not in key:
            made[key] = one
            continue
        sizes = {"gate": (16, 32), "up": (16, 32), "down": (32, 16)}
        for expert in range(8):
            for part, (rows, columns) in sizes.items():
                name = f"{key.partition('experts.')[0]}experts.{expert}.{part}_proj.lora_"
                made[name + "A.weight"] = torch.randn(4, columns, generator=generator) * 0.3
                made[name + "B.weight"] = torch.randn(rows, 4, generator=generator) * 0.3
    save_file(made, file)


def test_gates_and_ups_with_an_a_each_are_refused(tmp_path: Path, ranks: RankPool) -> None:
    adapter = save_adapter(tmp_path)
    by_hand(adapter)
    for more in ([], CONTINUED):
        with pytest.raises(RankError, match=r"gate and up of an expert have an A each\. Merge it with peft"):
            ranks.run(ours, 1, settled(adapter, *more))


def stating(**settings: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return change


def storing(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(adapter: Path) -> None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")

    return rewrite


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "overrides", "says"),
    [
        (stating(use_dora=True), [], r"'use_dora': True.*only plain LoRA is read.*merge_and_unload"),
        (stating(rank_pattern={"q_proj": 8}), [], "rank_pattern"),
        (stating(modules_to_save=["lm_head"]), [], "modules_to_save"),
        (stating(of_a_later_peft=0.5), [], "of_a_later_peft"),
        (stating(init_lora_weights="pissa"), [], "pissa"),
        (stating(use_rslora=True), [], "use_rslora"),
        (stating(bias="all"), [], "'bias': 'all'"),
        (stating(peft_type="LOHA"), [], "LOHA"),
        (stating(r="4"), [], "r='4'"),
        (stating(r=8), [], "other tensors than adapters of rank 8"),
        (stating(base_model_name_or_path="/gone/base"), [], r"names '/gone/base' as its base.*lora\.path"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("{"), [], "names nothing as its base"),
        (
            storing(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)})),
            [],
            "lm_head.lora_A",
        ),
        (
            storing(lambda t: [t.pop(Q.format(part)) for part in "AB"]),
            CONTINUED,
            r"has 2[0-9] matrices, and lora\.targets takes 2[0-9]",
        ),
        (stating(), ["lora.rank=8", "lora.alpha=6"], r"Set lora\.rank=4 .* or lora\.rank=0 to merge"),
        (stating(), ["lora.rank=4"], r"Set lora\.rank=4 lora\.alpha=6 "),
        (
            stating(),
            [*CONTINUED, "lora.targets=[attention]"],
            r"lora\.targets=\[experts\.down_proj,experts\.gate_up_proj,k_proj",
        ),
        (stating(), ["model.random_weights=true"], "an adapter of a checkpoint's weights"),
        (stating(), ["lora.path=/another"], "is an adapter too"),
        (
            stating(),
            ["train.freeze=['*router*']"],
            "reads frozen weights from model.hf_path again, without the adapter",
        ),
    ],
)
def test_what_cannot_start_is_refused(change: Any, overrides: list[str], says: str, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path)
    change(adapter)
    with pytest.raises((ConfigError, CheckpointError), match=says):
        check_here(settled(adapter, f"run_dir={tmp_path / 'run'}", *overrides))


def test_the_base_may_lie_elsewhere(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path)
    stating(base_model_name_or_path="/gone/base")(adapter)
    assert settled(tmp_path / "base", f"lora.path={adapter}").lora.path == str(adapter)
    with pytest.raises(CheckpointError, match=r"base: its adapter_config\.json cannot be read"):
        settled(tmp_path / "base", f"lora.path={tmp_path / 'base'}")


@pytest.mark.faults
def test_a_continued_adapter_is_killed_resumed_and_loads_in_peft(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path)
    save_tokenizer(tmp_path / "base", None)  # an adapter's own tokenizer is not taken over
    settings = (
        f"model.hf_path={adapter}", *CONTINUED, "lora.export=adapter", "data=stdlib", "data.max_bytes=20000",
        "train.steps=4", "train.seq_len=32", "train.global_batch_size=4", "train.micro_batch_size=1", "train.val_every=0",
        "optim.warmup_steps=1", "optim.lr=1e-2", "checkpoint.every=2", "observe.report=false", "launch.device=cpu",
        "moe.experts=loop", "mesh.dp_shard=2", "mesh.ep=2", "mesh.tp=2", "mesh.etp=2",
    )  # fmt: skip
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    straight, killed = (TrainCommand(tmp_path / name, settings, cache) for name in ("straight", "killed"))
    code, out, err = straight.run()
    assert code == 0 and f"the adapter {adapter} (rank 4, alpha 6, " in out and "is trained further" in out, err
    code, _, err = killed.run(fault="kill:rank=1:at=forward:step=4")
    assert code == 1 and "killed by SIGKILL" in err, err
    code, out, err = killed.run()
    assert code == 0 and killed.record() == straight.record(), err
    first, *both = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (adapter, straight.run_dir / "adapter", killed.run_dir / "adapter")
    )
    assert all(torch.equal(one, both[1][key]) for key, one in both[0].items())
    moved = (both[0][Q.format("A")] - first[Q.format("A")]).norm() / first[Q.format("A")].norm()
    assert 1e-4 < moved < 0.5, "it went on from where it was"
    again = settled(straight.run_dir / "adapter", *CONTINUED, "run_dir=" + str(tmp_path / "third"))
    assert again.model.hf_path == str(tmp_path / "base")
