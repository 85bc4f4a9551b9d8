"""Writes the answers and the table of recomputation in ``docs/plan.md``: ``make docs-config``; minutes, for its searches."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from automoe.config.batch import plan_batch
from automoe.config.compose import compose_config, list_options
from automoe.config.recompute import recompute_rows, recomputed_names
from automoe.config.rule_engine import check_rows
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.observe.summary import bytes_text, short_number
from automoe.plan import main
from automoe.planner.activations import UNEVEN, at_load
from automoe.planner.memory import plan_memory

PAGE = Path(__file__).parent / "plan.md"
BEGIN, END = "<!-- recompute: written by docs/write_plan.py -->\n", "<!-- end of recompute -->\n"
BEGIN_ANSWERS, END_ANSWERS = "<!-- answers: written by docs/write_plan.py -->\n", "<!-- end of answers -->\n"
CHOICES = ("", "layernorm", "mla_up_proj", "core_attn", "moe", "own", "full")
FLAGSHIPS = [name.removeprefix("tuned_") for name in list_options("mesh") if name.startswith("tuned_")]


def cell(config: Config, choice: str) -> str:
    """GiB of activations at even load and at twice, and of the whole peak; a dash where there is nothing to recompute."""
    own = recomputed_names(config.parallel)
    names = own if choice == "own" else (choice,) if choice else ()
    config = replace(config, parallel=replace(config.parallel, recompute=list(names)))
    try:
        check_rows(config, recompute_rows(config))
    except ConfigError:
        return "–"
    shape = validate(config, None, "cuda")
    batch = plan_batch(config, shape)
    loads = [plan_memory(config, shape, at_load(batch, load, config, shape)) for load in (1.0, UNEVEN)]
    even, uneven = (max(rank.activations + rank.recompute for rank in ranks) / 2**30 for ranks in loads)
    peak = max(rank.peak for rank in loads[1])
    return f"{even:.1f}, {uneven:.1f} ({peak / config.cluster.memory_bytes:.0%})"


def row(name: str) -> str:
    """Of one flagship, on its tuned mesh."""
    config = compose_config(name)
    own = " ".join(recomputed_names(config.parallel))
    cells = [f"`{name}`<br>{own}", *(cell(config, choice) for choice in CHOICES)]
    return "| " + " | ".join(cells) + " |\n"


def table() -> str:
    """A row a flagship."""
    headings = ["model, and its list", "nothing", *CHOICES[1:-2], "its list", "full"]
    return "| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|\n" + "".join(map(row, FLAGSHIPS))


class Question(NamedTuple):
    """What is asked, the words behind ``automoe plan`` that ask it, and how what they say is told."""

    text: str
    words: str
    told: Callable[[Config, dict[str, Any]], str]


def asked(words: str) -> dict[str, Any]:
    """What ``automoe plan`` says as JSON; a search writes its preset into a folder that goes away."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()):
        main([*shlex.split(words), "--json", *([f"out={folder}"] if "search=" in words else [])])
    return json.loads(said.getvalue())


def _speed(time: dict[str, Any]) -> str:
    low, high = map(short_number, time["tokens_per_second_band"])
    return f"{short_number(time['tokens_per_second'])} tokens/s ({low} to {high}), MFU {time['mfu']:.1%}"


def _axes(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis}{size}" for axis, size in mesh.items() if size > 1) or "one rank"


def best(config: Config, said: dict[str, Any]) -> str:
    """The fastest mesh of a search."""
    if not said["found"]:
        return "No: no mesh of these ranks fits."
    one, *others = said["found"]
    again = one["parallel"]["recompute"]
    again = "whole layers" if again == "full" else ", ".join(f"`{name}`" for name in again) or "nothing"
    stages = one["parallel"]["stages_per_rank"]
    schedule = f"{one['parallel']['schedule']}{f', {stages} stages a rank' if stages > 1 else ''}, "
    need, limit = bytes_text(one["needed_at_twice_the_even_load"]), bytes_text(config.cluster.memory_bytes or 0)
    slower = f" The second of its ten is {_axes(others[0]['mesh'])}, " if others else ""
    slower += (
        f"{1 - others[0]['time']['tokens_per_second'] / one['time']['tokens_per_second']:.1%} slower." if others else ""
    )
    return (
        f"{_axes(one['mesh'])}, {schedule if one['mesh']['pp'] > 1 else ''}rows of {one['seq_len']:,} tokens in "
        f"micro-batches of {one['train']['micro_batch_size']}, with {again} recomputed: {_speed(one['time'])}. It needs "
        f"{need} of {limit} at twice the even load of experts, the reserve included.{slower}"
    )


def fit(config: Config, said: dict[str, Any]) -> str:
    """Whether one mesh fits, and what the plan says if it does not, but for the single changes that it lists."""
    limit = bytes_text(config.cluster.memory_bytes or 0)
    even, uneven = bytes_text(said["needed"]), bytes_text(said["needed_at_twice_the_even_load"])
    found = f"It needs {even} at even load and {uneven} at twice, of {limit}; {_speed(said['time'])}"
    found += "." if said["time"]["calibrated"] else ", uncalibrated."
    return " ".join([found, *(f"{text.partition('. Single changes')[0]}." for text in said["warnings"])])


def saved(config: Config, said: dict[str, Any]) -> str:
    """What a checkpoint costs."""
    cost = said["checkpoint"]
    return (
        f"{bytes_text(cost['bytes'])} in {cost['num_files']:,} files; {cost['write_seconds']:.0f} s to write at "
        f"{cost['node_bandwidth'] / 1e9:g} GB/s a node, {cost['blocked_seconds']:.2f} s of them with training at a stand; "
        f"{bytes_text(cost['disk_bytes'])} of disk for all that are kept."
    )


QWEN, DEEPSEEK = "--config-name qwen3_30b_a3b", "--config-name dsv3_671b"
QUESTIONS = [
    Question("Does Qwen3-30B train on 8 H100 at 4K?", f"{QWEN} search=true world=8", best),
    Question(
        "And with LoRA on one?",
        "--config-name qwen3_30b_a3b_sft lora.rank=16 lora.base=nf4 optim.master_weights=float32 optim.moments=float32 "
        "search=true world=1",
        best,
    ),
    Question("Which recomputation?", "--config-name qwen3_235b_a22b parallel.recompute=[]", fit),
    Question("DeepSeek-V3 on 256?", f"{DEEPSEEK} search=true world=256 mesh.tp=1 parallel.recompute=full", best),
    Question(
        "At 128K?",
        f"{DEEPSEEK} search=true world=1024 train.seq_len=131072 train.global_batch_size=256 parallel.recompute=full "
        "train.micro_batch_size=1",
        best,
    ),
    Question("The best mesh?", f"{DEEPSEEK} search=true world=1024", best),
    Question("The largest micro-batch?", f"{QWEN} search=largest_batch world=16 mesh.tp=1 mesh.cp=1", best),
    Question("What if experts are uneven?", "--config-name gpt_oss_120b parallel.recompute=[layernorm]", fit),
    Question("Another GPU?", f"{DEEPSEEK} cluster=b200", fit),
    Question("What does a checkpoint cost?", DEEPSEEK, saved),
]


def entry(question: Question) -> str:
    """A question with its command and its answer."""
    name, *words = shlex.split(question.words)[1:]
    overrides = [word for word in words if word.split("=")[0] not in ("search", "world")]
    told = question.told(compose_config(name, overrides), asked(question.words))
    return f"**{question.text}**\n\n```\nautomoe plan {question.words}\n```\n\n{told}\n\n"


def page() -> str:
    """``docs/plan.md`` with the answers and the table as they are now."""
    text = PAGE.read_text()
    answers = "".join(map(entry, QUESTIONS))
    for begin, end, made in ((BEGIN, END, table()), (BEGIN_ANSWERS, END_ANSWERS, answers)):
        before, rest = text.split(begin)
        text = before + begin + made + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
