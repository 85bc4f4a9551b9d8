"""Every setting that an error advises is carried out: it ends in a configuration that passes, and is never refused.

The errors are those of the other tests of rules, with a few more; remedies are read out of their text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from automoe.config.compose import key_of
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.launch import prepare
from tests.config.test_validate import BAD
from tests.support.chat import messages, save_tokenizer, write_chat
from tests.support.configurations import quick_config
from tests.support.hf_models import save_small_hf
from tests.support.preference import write_pairs

_VALUE = r"(?:\[[^\]]*\]|\{[^}]*\}|[^\s,;()|]+)"
_SETTING = re.compile(rf"(?<![\w.])((?:[a-z_]\w*\.)*[a-z_]\w*)=({_VALUE})")


def choices(remedy: str) -> list[list[str]]:
    """The overrides of each way out that a remedy spells: ``K=1 or 2, or L=3 M=4`` has three."""
    found: list[list[str]] = []
    key = ""
    for part in re.split(r",? or |; ", remedy.rstrip(".")):
        if settings := _SETTING.findall(part):
            found.append([f"{name}={value.rstrip('.')}" for name, value in settings])
            key = settings[-1][0]
        elif key and re.fullmatch(r"-?[\d.]+(?:e-?\d+)?", part):
            found.append([f"{key}={part}"])
        elif key and part in ("drop", "truncate", "weights", "null", "error"):
            found.append([f"{key}={part}"])
    return found


def test_ways_out_are_read_from_a_sentence() -> None:
    assert choices("Nearest valid choices: a.b=260 or 264, or mesh.tp=2") == [["a.b=260"], ["a.b=264"], ["mesh.tp=2"]]
    assert choices("Set a=1 b.c=[2,2], or d=x") == [["a=1", "b.c=[2,2]"], ["d=x"]]
    assert choices("Set a.b=4 or less. It is so") == [["a.b=4"]]
    assert choices("Name another one, or a smaller micro_batch_size") == []


class Files:
    """What placeholders of remedies stand for."""

    def __init__(self, folder: Path) -> None:
        (folder / "a.txt").write_text("some text of a few words\n" * 50)
        save_tokenizer(folder / "tokenizer", "chatml")
        save_small_hf("qwen3_moe", folder / "hf", other_sizes={"vocab_size": 322, "num_hidden_layers": 2})
        save_tokenizer(folder / "hf", "chatml")
        (folder / "routing" / "step-0").mkdir(parents=True)
        (folder / "routing" / "step-0" / "rank-0.npz").touch()
        chats = write_chat(folder / "chats.jsonl", [messages(f"{n}?", "yes") for n in range(8)])
        pairs = write_pairs(folder / "pairs.jsonl", 8)
        self.folder = folder
        self.files = {"text": folder / "a.txt", "chat": chats, "preference": pairs}

    def filled(self, given: list[str]) -> list[str]:
        kind = next((one.partition("=")[2] for one in given if key_of(one) in ("data", "data.kind")), "text")
        values = {"FILE": self.files.get(kind, self.files["text"]), "DIR": self.folder / "hf"}
        return [f"{key}={values.get(value, value)}" for key, _, value in (one.partition("=") for one in given)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("remedies"))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the checkout a recipe's name would be that of a file."""
    monkeypatch.chdir(tmp_path)


def refused(ranks: int | None, overrides: list[str], device: str | None, name: str) -> ConfigError | None:
    try:
        config = prepare.settle(quick_config(name, overrides), overrides)
        prepare.check(config, ranks, device)
    except ConfigError as error:
        return error
    return None


def ends(
    ranks: int | None, overrides: list[str], files: Files, device: str | None = None, name: str = "config"
) -> None:
    """Each way out of the error is taken, and those of the errors behind it, until nothing is refused."""
    error = refused(ranks, overrides, device, name)
    assert error is not None, "no error"
    for taken in choices(error.remedy):
        given, seen, met = list(overrides), [], error
        way = taken
        while met is not None:
            assert (met.key, met.rule) not in seen and len(seen) < 6, f"{seen} then {met}: {given}"
            seen.append((met.key, met.rule))
            changed = {key_of(one) for one in way}
            given = [one for one in given if key_of(one) not in changed] + files.filled(way)
            met = refused(ranks, given, device, name)
            assert met is None or choices(met.remedy), f"{overrides}: after {way} there is no way out of: {met}"
            way = choices(met.remedy)[0] if met is not None else []


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("ranks", "overrides"), [one[:2] for one in BAD], ids=map(lambda case: " ".join(case[1]), [one[:2] for one in BAD])
)
def test_what_an_error_says_to_set_passes(ranks: int, overrides: list[str], files: Files) -> None:
    overrides = [one.replace("my.txt", str(files.files["text"])) for one in overrides]
    ends(ranks, ["mesh=fsdp", *overrides], files)


MORE: dict[str, tuple[int, list[str], Any]] = {
    "half a conversation": (1, ["data=chat", "data.path=CHAT", "data.on_long=split"], "sft_small"),
    "pairs cut": (1, ["data.on_long=truncate"], "dpo_small"),
    "pairs in pretraining": (1, ["recipe=pretrain"], "dpo_small"),
    "a share of text": (1, ["data.on_long=drop"], "config"),
    "packed without a mask": (1, ["data.document_mask=false"], "sft_small"),
    "best without validation": (1, ["checkpoint.keep_best=1", "train.val_every=0"], "config"),
    "kept between saves": (1, ["checkpoint.keep_every=150"], "config"),
    "samples without validation": (1, ["observe.samples=[a]", "train.val_every=0"], "config"),
    "averages": (1, ["checkpoint.export_ema=true"], "config"),
    "moments": (1, ["optim.moments=bfloat16"], "config"),
    "stochastic": (1, ["optim.master_weights=stochastic"], "config"),
    "benchmark's tokenizer": (1, ["data=benchmark", "lora.rank=2", "lora.export=adapter"], "config"),
    "a base of adapters": (1, ["lora.base=nf4"], "config"),
    "ring": (2, ["model=small_dsv32", "mesh.cp=2", "parallel.context=ring"], "config"),
    "replayed": (1, ["moe.replay_routing=ROUTING", "moe.gate=zipf"], "config"),
    "padded": (1, ["moe.pad_to_capacity=true"], "config"),
    "deepep": (1, ["moe.dispatcher=deepep"], "config"),
    "hierarchical": (4, ["mesh.ep=4", "moe.dispatcher=hierarchical", "cluster.gpus_per_node=3"], "config"),
    "jitter": (1, ["moe.router_jitter=1"], "config"),
    "gate": (1, ["moe.gate=empty", "model.num_experts_per_token=16"], "config"),
    "windows": (1, ["model=small_gpt_oss", "model.attention.sliding_window=0"], "config"),
    "delta nets on tp": (2, ["model=small_qwen3_next", "mesh.tp=2", "model.attention.linear_num_key_heads=3", "model.attention.linear_num_value_heads=3"], "config"),
    "delta nets on cp": (8, ["model=small_qwen3_next", "mesh.cp=8"], "config"),
    "ulysses": (4, ["mesh.cp=4", "mesh.tp=1", "parallel.context=ulysses", "model.attention.num_heads=6"], "config"),
    "swiglu": (1, ["model=small_gpt_oss", "model.swiglu_limit=0"], "config"),
    "fp8": (1, ["train.fp8=blockwise", "moe.experts=loop"], "config"),
    "fp8 compiled": (1, ["train.fp8=tensorwise", "train.compile=true"], "config"),
    "kernels": (1, ["kernels.attention=te", "kernels.norm=te"], "config"),
    "experts": (1, ["moe.experts=te"], "config"),
    "one row in two stages": (2, ["mesh.pp=2", "train.micro_batch_size=1", "train.global_batch_size=1"], "config"),
    "three rows in two stages": (2, ["mesh.pp=2", "train.micro_batch_size=3", "train.global_batch_size=3"], "config"),
    "one row to merge": (2, ["mesh.ep=2", "parallel.overlap_all_to_all=true", "train.micro_batch_size=1", "train.global_batch_size=2"], "config"),
    "eight rows to merge": (2, ["mesh.ep=2", "parallel.overlap_all_to_all=true", "train.micro_batch_size=4", "train.global_batch_size=8"], "config"),
    "a latent on shards": (64, ["model=small_muse", "checkpoint.export_hf=false", "model.moe_intermediate_size=128", "mesh.dp_shard=64", "mesh.ep_shard=64", "train.global_batch_size=64", "train.micro_batch_size=1"], "config"),
    "a module beside a tied head": (2, ["model=small_dsv3", "model.tie_embeddings=true", "model.num_mtp_layers=1", "mesh.pp=2", "parallel.schedule=ZBVZeroBubble", "parallel.stages_per_rank=2"], "config"),
}  # fmt: skip


@pytest.mark.one_in(8)
@pytest.mark.parametrize("case", list(MORE), ids=str)
def test_what_other_errors_say_to_set_passes(case: str, files: Files) -> None:
    ranks, overrides, name = MORE[case]
    given = {"CHAT": files.files["chat"], "ROUTING": files.folder / "routing"}
    overrides = [f"{key}={given.get(value, value)}" for key, _, value in (one.partition("=") for one in overrides)]
    ends(ranks, ["mesh=fsdp", *overrides], files, name=name)


RAMPS = [
    ["mesh.pp=1"],
    ["mesh.pp=1", "mesh.ep=2", "parallel.overlap_all_to_all=true"],
    ["mesh.pp=2"],
    ["mesh.pp=2", "parallel.schedule=GPipe", "train.micro_batch_size=2"],
    ["mesh.pp=2", "parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2"],
    ["mesh.pp=2", "parallel.schedule=DualPipeV", "parallel.stages_per_rank=2"],
]


@pytest.mark.parametrize("overrides", RAMPS, ids=" ".join)
def test_a_ramp_takes_exactly_the_batches_that_its_error_names(overrides: list[str]) -> None:
    config = quick_config(overrides=["mesh=fsdp", "train.micro_batch_size=1", *overrides])

    def error_of(start: int, increment: int, *over: int) -> str:
        train = replace(config.train, rampup_batch_size=[start, increment, *over], global_batch_size=start + increment)
        try:
            validate(replace(config, train=train), 2, "cpu")
        except ConfigError as error:
            return error.remedy if error.key == "train.rampup_batch_size" else ""
        return "accepted"

    unit, first = re.fullmatch(r".*multiples of (\d+)(?:, start at least (\d+))?, and .*", error_of(64, 64)).groups()
    for start, increment in product(range(1, 13), (1, 2, 3, 4, 6, 8)):
        fits = start % int(unit) == 0 == increment % int(unit) and start >= int(first or 0)
        assert (error_of(start, increment, 100) == "accepted") == fits, (start, increment)


def test_a_module_is_told_which_of_two_reasons_it_has() -> None:
    ranks, overrides, name = MORE["a module beside a tied head"]
    error = refused(ranks, ["mesh=fsdp", *overrides], None, name)
    assert "a module beside a tied head" in error.rule and "more than one depth" not in error.rule


HF = [
    (4, ["mesh.tp=4"]),  # 322 rows of the embedding
    (3, ["mesh.tp=3"]),
    (3, ["mesh.ep=3"]),
    (3, ["mesh.etp=3"]),
    (8, []),
    (8, ["mesh.pp=8"]),
    (5, ["mesh.tp=5", "mesh.cp=1"]),
    (1, ["data.tokenizer=byte", "model.vocab_size=128"]),
    (1, ["train.fp8=tensorwise", "moe.experts=loop"]),
    (1, ["train.dtype=float64", "moe.experts=triton"]),
    (1, ["lora.rank=2", "lora.base=fp8"]),
    (1, ["lora.rank=2", "lora.base=nf4", "mesh.tp=1"]),
    (1, ["model.num_experts=6"]),
    (16, ["mesh.ep_shard=16"]),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("ranks", "overrides"), HF, ids=map(lambda case: f"{case[0]} " + " ".join(case[1]), HF))
def test_no_error_over_a_checkpoint_says_to_change_its_model(ranks: int, overrides: list[str], files: Files) -> None:
    given = [
        "mesh=fsdp", f"model.hf_path={files.folder / 'hf'}", "data=text", f"data.path={files.files['text']}",
        "train.global_batch_size=240", "train.seq_len=240", *overrides,
    ]  # fmt: skip
    error = refused(ranks, given, None, "config")
    if error is None:
        return
    assert not re.search(r"model\.(?!hf_path|vocab_size)[\w.]+(=| to )\S", error.remedy), error
    ends(ranks, given, files)
