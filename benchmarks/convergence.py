"""A small model of Moonlight's shape learns real text: AdamW, Muon, two meshes, transformers' Trainer, FP8, MTP.

    python benchmarks/run.py convergence          # an hour of two cores; the JSON, the picture and the page's tables
    python benchmarks/run.py convergence --draw   # picture and tables again, from the JSON

Each finished run is kept in the JSON, and the same command goes on with those that are missing. Runs of one seed start
from the same weights and see the same rows in the same order; validation rows are the same for all seeds. The Trainer of
``transformers`` gets the exported first weights and the loader's rows, with two things that it lacks: our schedule's
learning rates and, after each step, the update of the routers' biases.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import HERE, commit, cpu_model

ROOT = HERE.parent
PAGE = ROOT / "docs" / "convergence.md"
RESULT = HERE / "results" / "convergence.json"
BEGIN, END = "<!-- figures: written by benchmarks/convergence.py -->\n", "<!-- end of figures -->\n"
STEPS, EXACT_STEPS = 200, 12
LAST = 50  # steps whose mean is the training loss of the end
MODEL = (
    "model=moonlight_16b_a3b model.vocab_size=264 model.hidden_size=128 model.num_layers=4 model.intermediate_size=704 "
    "model.num_experts=32 model.num_experts_per_token=4 model.moe_intermediate_size=128 model.attention.num_heads=4 "
    "model.attention.num_kv_heads=4 model.attention.kv_lora_rank=32 model.attention.qk_nope_head_dim=32 "
    "model.attention.qk_rope_head_dim=16 model.attention.v_head_dim=32"
)
# A run of minutes needs a larger bias rate than the published 1e-3; the loss is the cross-entropy alone.
TRAINED = (
    "moe.bias_update_rate=1e-2 moe.seq_balance_coef=0 train.seq_len=256 train.global_batch_size=8 train.val_every=20 "
    "train.val_batches=4 checkpoint=none checkpoint.export_hf=false observe.report=false"
)
MESHES = {
    "one rank": "mesh.pp=1 mesh.ep=1 launch.num_ranks=1 train.micro_batch_size=8",
    "pp2 dp2 ep2": "mesh.pp=2 mesh.ep=2 launch.num_ranks=4 train.micro_batch_size=2",
    "tp2 cp2 ep4": "mesh.pp=1 mesh.tp=2 mesh.cp=2 mesh.ep=4 launch.num_ranks=4 train.micro_batch_size=8",
}
ONE, OTHER, THIRD = MESHES
EXACT = f"train.dtype=float64 moe.experts=loop train.steps={EXACT_STEPS} train.val_every={EXACT_STEPS}"
ARMS = {
    "AdamW": "",
    "Muon": "optim=muon",
    "AdamW, FP8": "train.fp8=blockwise",
    "AdamW, MTP": "model.num_mtp_layers=1",
    "AdamW, float64": EXACT,
    "Muon, float64": f"optim=muon {EXACT}",
}
TRAINER = "transformers' Trainer"
# Arm, mesh, seed; what is most wanted first.
RUNS = [
    *(("AdamW", ONE, 0), ("AdamW", TRAINER, 0), ("AdamW, FP8", ONE, 0), ("Muon", ONE, 0), ("AdamW", OTHER, 0)),
    *((f"{arm}, float64", mesh, 0) for arm in ("AdamW", "Muon") for mesh in MESHES),
    *(("AdamW", ONE, 1), ("AdamW", ONE, 2), ("Muon", ONE, 2), ("Muon", OTHER, 0), ("AdamW, MTP", ONE, 0)),
    *(("AdamW", TRAINER, 1), ("AdamW", TRAINER, 2)),
]
KEPT = ("loss", "grad_norm", "expert_max_load", "mtp_loss.1", "mtp_acceptance.1")


def name_of(arm: str, where: str, seed: int) -> str:
    return f"{arm} | {where} | seed {seed}"


def words_of(arm: str, where: str, seed: int) -> list[str]:
    """What is typed behind ``automoe train``."""
    words = f"train.steps={STEPS} {MODEL} {TRAINED} {MESHES.get(where, MESHES[ONE])} {ARMS[arm]} train.seed={seed}"
    return list({word.split("=")[0]: word for word in words.split()}.values())


# ---------------------------------------------------------------- one run


def run(arm: str, where: str, seed: int) -> dict[str, Any]:
    """Train in a process of its own; return what it recorded and what it cost.

    Raises:
        SystemExit: the run failed; the message is what it printed.
    """
    words = words_of(arm, where, seed)
    with tempfile.TemporaryDirectory(prefix="automoe-convergence-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "automoe.train", *words, f"run_dir={folder / 'run'}"]
        if where == TRAINER:
            command = [sys.executable, __file__, "--trainer", str(folder / "run"), *words]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}", "HF_HUB_OFFLINE": "1"}
        with (folder / "said").open("w") as said:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{name_of(arm, where, seed)}:\n{(folder / 'said').read_text()[-3000:]}")
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "command": " ".join(["transformers.Trainer" if where == TRAINER else "automoe train", *words]),
        "commit": commit("../automoe", "../recipes", "../conf", "convergence.py"),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "validation": {one["step"]: one["val_loss"] for one in records if "val_loss" in one},
        **{key: [one[key] for one in records] for key in KEPT if key in records[0]},
    }


def train_by_trainer(folder: Path, words: list[str]) -> None:
    """Train with ``transformers.Trainer`` and write ``metrics.jsonl`` with a step's loss and the validation losses."""
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import AutoModelForCausalLM, Trainer

    from automoe.config.compose import compose_config
    from automoe.data.loader import Loader
    from automoe.optim.schedule import learning_rate

    torch.set_num_threads(1)
    config = compose_config(overrides=words)
    optim, train = config.optim, config.train
    loader = Loader(config, 0, 1)
    export_first_weights(config, folder / "hf")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "hf", dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    records: list[dict[str, float]] = []

    class Scheduled(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
            rates = [learning_rate(optim, step, train.steps) / optim.lr for step in range(train.steps)]
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: rates[min(step, train.steps - 1)])
            return self.lr_scheduler

    def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    rows = []
    for _ in range(train.steps):
        batch = inputs_of(loader.next_step())
        rows += [{name: column[row] for name, column in batch.items()} for row in range(train.global_batch_size)]
    Scheduled(
        model,
        arguments_of(config, folder / "trainer"),
        data_collator=stack,
        train_dataset=rows,
        callbacks=[what_it_lacks(model, config, loader, records)],
    ).train()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def export_first_weights(config: Any, folder: Path) -> None:
    """Write the weights that a run of ``config`` starts from as a checkpoint of ``transformers``."""
    import torch.distributed as dist

    from automoe.config.validate import validate
    from automoe.hf.write import to_hf
    from automoe.launch.ranks import init_ranks, store_file
    from automoe.parallel.mesh import build_meshes
    from automoe.parallel.parallelize import build_parts
    from automoe.run.weights import load_or_initialize

    with store_file() as store:
        device = init_ranks(config.launch, 0, 1, 0, store)
        parts = build_parts(config, build_meshes(validate(config, 1), device))
        load_or_initialize(parts, config, device)
        to_hf(parts, folder)
        dist.destroy_process_group()


def inputs_of(batch: Any) -> dict[str, Any]:
    """A batch of ours as the model of ``transformers`` takes it: labels stand where they are predicted."""
    from automoe.comm.tokens import IGNORE

    labels = batch.labels.masked_fill(batch.labels == IGNORE, -100)
    return {"input_ids": batch.tokens, "labels": labels, "shift_labels": labels, "position_ids": batch.positions}


def what_it_lacks(model: Any, config: Any, loader: Any, records: list[dict[str, float]]) -> Any:
    """A callback that updates the routers' biases after each step, validates when it is due, and fills ``records``."""
    import torch
    from transformers import TrainerCallback

    train = config.train
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    counts = {gate: torch.zeros(config.model.num_experts) for gate in gates}

    def count(gate: Any, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            counts[gate] += torch.bincount(output[2].flatten(), minlength=config.model.num_experts)

    for gate in gates:
        gate.register_forward_hook(count)

    @torch.no_grad()
    def validate() -> float:
        total = trained = 0.0
        for batch in loader.batches("validation", train.val_batches):
            inputs = inputs_of(batch)
            number = int((inputs["labels"] >= 0).sum())
            total, trained = total + float(model(**inputs).loss) * number, trained + number
        return total / trained

    class Beside(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            for gate, counted in counts.items():
                gate.e_score_correction_bias += config.moe.bias_update_rate * torch.sign(counted.mean() - counted)
                counted.zero_()
            records.append({"step": state.global_step})
            if state.global_step % train.val_every == 0 or state.global_step == train.steps:
                records[-1]["val_loss"] = validate()

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                records[-1] |= {"loss": float(logs["loss"]), "grad_norm": float(logs["grad_norm"])}

    return Beside()


def arguments_of(config: Any, folder: Path) -> Any:
    """The Trainer's settings, all else at its defaults."""
    from transformers import TrainingArguments

    optim, train = config.optim, config.train
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=train.steps,
        per_device_train_batch_size=train.global_batch_size,
        train_sampling_strategy="sequential",
        learning_rate=optim.lr,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=train.grad_clip,
        use_cpu=True,
        remove_unused_columns=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


# ---------------------------------------------------------------- all runs


def text_facts() -> dict[str, Any]:
    """What was read: the text's digest and size, and the entropy of a token without its context, in nats."""
    import numpy as np

    from automoe.config.compose import compose_config
    from automoe.data.loader import Loader

    loader = Loader(compose_config(overrides=words_of("AdamW", ONE, 0)), 0, 1)
    [corpus] = loader.corpora
    shares = np.bincount(np.asarray(corpus.tokens)) / len(corpus.tokens)
    shares = shares[shares > 0]
    return {
        "text": f"the library of Python {platform.python_version()}",
        "text_bytes": int(corpus.text_bytes),
        "content": corpus.content,
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
    }


def measure(out: Path, jobs: int) -> None:
    """Make the runs that ``out`` lacks, ``jobs`` at a time, and keep each as soon as it has finished."""
    report = json.loads(out.read_text()) if out.exists() else {"runs": {}}
    kept = report["runs"]
    report = {
        "what": "losses of a small model of Moonlight's shape on real text",
        "cpu": cpu_model(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        **text_facts(),
        "runs": {},
    }
    lock = threading.Lock()

    def one(which: tuple[str, str, int]) -> None:
        name = name_of(*which)
        command = " ".join(words_of(*which))
        if name not in kept or not kept[name]["command"].endswith(command):
            print(f"{name} starts", flush=True)
            made = run(*which)
            with lock:
                kept[name] = made
                report["runs"] = {name: kept[name] for name in (name_of(*one) for one in RUNS) if name in kept}
                out.write_text(json.dumps(report) + "\n")
            last = list(made["validation"].values())[-1]
            print(f"{name}: {last:.4f} after {made['cpu_seconds']:.0f} CPU-seconds", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, RUNS))


# ---------------------------------------------------------------- what they show


def get(report: dict[str, Any], arm: str, where: str, seed: int) -> dict[str, Any] | None:
    return report["runs"].get(name_of(arm, where, seed))


def last(run: dict[str, Any] | None) -> str:
    """The validation loss after the last step, as text."""
    return "" if run is None else f"{list(run['validation'].values())[-1]:.4f}"


def apart(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, ...]:
    """Largest difference of a step's loss up to step 20 and of all, of the validation losses, and of the last of those."""
    losses = [abs(a - b) for a, b in zip(one["loss"], other["loss"], strict=True)]
    held_out = [abs(a - b) for a, b in zip(one["validation"].values(), other["validation"].values(), strict=True)]
    return max(losses[:20]), max(losses), max(held_out), held_out[-1]


def largest(pairs: list[tuple[Any, Any]]) -> tuple[float, ...]:
    """``apart`` over pairs of runs, the largest of each; runs that are not there are left out."""
    found = [apart(one, other) for one, other in pairs if one and other]
    return tuple(max(column) for column in zip(*found, strict=True))


def relative(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest relative difference of losses, gradient norms and the validation loss of two runs."""
    pairs = [
        *(pair for key in ("loss", "grad_norm") for pair in zip(one[key], other[key], strict=True)),
        *zip(one["validation"].values(), other["validation"].values(), strict=True),
    ]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def differences(report: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """``largest`` by what differs between two runs."""

    def pairs(one: tuple[str, str], other: tuple[str, str]) -> list[tuple[Any, Any]]:
        return [(get(report, *one, seed), get(report, *other, seed)) for seed in range(3)]

    def seeds(arm: str) -> list[tuple[Any, Any]]:
        return [(get(report, arm, ONE, one), get(report, arm, ONE, two)) for one, two in ((0, 1), (0, 2), (1, 2))]

    adamw = ("AdamW", ONE)
    return {
        "AdamW: the mesh": largest(pairs(adamw, ("AdamW", OTHER))),
        "Muon: the mesh": largest(pairs(("Muon", ONE), ("Muon", OTHER))),
        f"AdamW: {TRAINER}": largest(pairs(adamw, ("AdamW", TRAINER))),
        "AdamW: FP8": largest(pairs(adamw, ("AdamW, FP8", ONE))),
        "AdamW: MTP": largest(pairs(adamw, ("AdamW, MTP", ONE))),
        "AdamW: the seed": largest(seeds("AdamW")),
        "Muon: the seed": largest(seeds("Muon")),
    }


def tables(report: dict[str, Any]) -> str:
    """What stands between the page's markers."""
    shown = [
        *(("AdamW", where) for where in (ONE, OTHER, TRAINER)),
        *(("AdamW, FP8", ONE), ("AdamW, MTP", ONE), ("Muon", ONE), ("Muon", OTHER)),
    ]
    lines = [f"| validation loss after {STEPS} steps | seed 0 | seed 1 | seed 2 |", "|---|---|---|---|"]
    for arm, where in shown:
        cells = [last(get(report, arm, where, seed)) for seed in range(3)]
        lines.append(f"| {arm}, {where} | {' | '.join(cells)} |")
    lines += ["", "| largest difference by | loss to step 20 | loss of a step | validation loss | the last |"]
    lines.append("|---|---|---|---|---|")
    for name, found in differences(report).items():
        # Steps of two seeds have other rows, so their losses say nothing.
        cells = ["" if "seed" in name and place < 2 else f"{value:.1e}" for place, value in enumerate(found)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| {EXACT_STEPS} steps in float64 | {OTHER} | {THIRD} |", "|---|---|---|"]
    for arm in ("AdamW, float64", "Muon, float64"):
        runs = [get(report, arm, mesh, 0) for mesh in MESHES]
        cells = [f"{relative(runs[0], other):.1e}" for other in runs[1:]]
        lines.append(f"| {arm.split(',')[0]}, relative to one rank | {' | '.join(cells)} |")
    runs, versions = report["runs"].values(), report["versions"]
    minutes = sum(one["cpu_seconds"] for one in runs) / 60
    commits = ", ".join(sorted({f"`{one['commit'][:10]}`" for one in runs}))
    lines += [
        "",
        f"{len(runs)} runs, {minutes:.0f} CPU-minutes of {report['cpu']}, at {commits}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}. A byte without its context has {report['unigram_entropy']:.3f} nats.",
    ]
    return "\n".join(lines) + "\n"


def page(report: dict[str, Any]) -> str:
    """``docs/convergence.md`` with the tables of ``report``."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + tables(report) + END + rest.split(END)[1]


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib import rc_context

    from automoe.observe.plot_style import BLUE, GREEN, INK, MUTED, ORANGE, RC, RED, new_figure

    with rc_context(RC | {"svg.hashsalt": "automoe"}):
        figure, (left, right) = new_figure(10, 4.2, columns=2)
        curves = [
            ("AdamW, one rank", "AdamW", ONE, {"color": BLUE}),
            ("AdamW, transformers' Trainer", "AdamW", TRAINER, {"color": INK, "linestyle": ":"}),
            ("AdamW, FP8", "AdamW, FP8", ONE, {"color": RED, "linewidth": 1}),
            ("AdamW, MTP", "AdamW, MTP", ONE, {"color": GREEN, "linewidth": 1}),
            ("Muon, one rank", "Muon", ONE, {"color": ORANGE}),
        ]
        for label, arm, where, style in curves:
            for seed in range(3):
                if one := get(report, arm, where, seed):
                    steps = [int(step) for step in one["validation"]]
                    left.plot(steps, list(one["validation"].values()), label=label if seed == 0 else None, **style)
        left.axhline(
            report["unigram_entropy"], color=MUTED, linewidth=1, linestyle="--", label="a byte without context"
        )
        left.set(title="Validation loss, all seeds", xlabel="step", ylabel="nats a byte")
        left.legend()
        base = get(report, "AdamW", ONE, 0)
        against = [
            ("FP8", get(report, "AdamW, FP8", ONE, 0), RED),
            ("transformers' Trainer", get(report, "AdamW", TRAINER, 0), INK),
            (OTHER, get(report, "AdamW", OTHER, 0), BLUE),
        ]
        for label, other, colour in against:
            if base and other:
                gaps = [abs(a - b) for a, b in zip(base["loss"], other["loss"], strict=True)]
                right.semilogy(range(1, len(gaps) + 1), [gap or None for gap in gaps], color=colour, label=label, lw=1)
        if second := get(report, "AdamW", ONE, 1):
            gaps = [abs(a - b) for a, b in zip(base["validation"].values(), second["validation"].values(), strict=True)]
            steps = [int(step) for step in base["validation"]]
            right.semilogy(steps, gaps, "o", color=MUTED, markersize=4, label="another seed, validation loss")
        right.set(title="Training loss, from AdamW on one rank", xlabel="step", ylabel="nats a byte, seed 0")
        right.legend()
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--draw", action="store_true", help="draw what was measured before, and write the page's tables"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the JSON goes")
    parser.add_argument("--trainer", nargs="+", metavar=("FOLDER", "WORD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        train_by_trainer(Path(args.trainer[0]), args.trainer[1:])
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not args.draw:
        measure(args.out, args.jobs)
    report = json.loads(args.out.read_text())
    draw(report, args.out.with_suffix(".svg"))
    if args.out == RESULT:
        PAGE.write_text(page(report))


if __name__ == "__main__":
    main()
