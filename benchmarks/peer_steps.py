"""CPU seconds and peak memory of a training step, ours beside peft, transformers' Trainer, and its own FSDP2 and experts.

Each contender has processes of its own, starts from the same files, and gets the same rows; steps take turns, so that noise
of the machine meets both. Losses of every step must be equal, else nothing is reported. A step is forward, backward and the
update (ours also takes the gradient norm). CPU seconds are the sum over ranks, one thread each, in float32. Peak memory is
the largest rank's during the timed steps: all of the process, and what exceeds the process with its model loaded.

    python benchmarks/peer_steps.py                   # about six minutes; writes benchmarks/results/peer_steps.json
    python benchmarks/peer_steps.py --quick           # small models and two rounds, to check the script itself
    python benchmarks/peer_steps.py --case four_ranks # one case
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import commit, cpu_model, memory, result_file

GATE = 1e-5  # relative difference of a step's loss that is accepted
LR, UNTIMED = 1e-4, 2
EXPERTS, ATTENTION = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]
# Case -> (peer, experts, ranks, rows of a rank); models have the shape of Qwen3-MoE, and 4 experts are chosen.
CASES = {
    "lora_16_experts": ("peft", 16, 1, 4),
    "lora_64_experts": ("peft", 64, 1, 4),
    "trainer": ("trainer", 16, 1, 4),
    "four_ranks": ("transformers", 16, 4, 2),
}
Step = Callable[[], float]  # one training step; returns its loss, the mean over all ranks


def save_model(folder: Path, experts: int, quick: bool, adapter: bool) -> None:
    """Write the model that both start from, and beside it, in ``adapter``, what peft adds to it."""
    from contenders import transformers_model
    from sft_step import model

    torch.manual_seed(0)
    shape = model(vocab=8192, layers=2 if quick else 4, hidden=64 if quick else 256)
    transformers_model(replace(shape, num_experts=experts), "grouped_mm").save_pretrained(folder)
    if adapter:
        import transformers
        from peft import LoraConfig, get_peft_model

        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        asked = LoraConfig(
            r=8,
            lora_alpha=16,
            lora_dropout=0.0,
            target_modules=ATTENTION,
            target_parameters=EXPERTS,
            init_lora_weights=False,
        )
        get_peft_model(base, asked).save_pretrained(folder / "adapter")


def rows_of(rank: int, rows: int, seq_len: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels of each step, [rows, seq_len]: a label is the next token, and the last is not trained."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        tokens = torch.randint(0, 8192, (rows, seq_len), generator=generator)
        labels = torch.full_like(tokens, -100)
        labels[:, :-1] = tokens[:, 1:]
        yield tokens, labels


def ours(case: str, folder: Path, rank: int, seq_len: int) -> Step:
    """Build the step of ``recipes/pretrain.py``."""
    from automoe.comm.tokens import StepBatch
    from automoe.config.compose import Arguments
    from automoe.config.mesh_shape import resolve_mesh
    from automoe.launch.prepare import compose
    from automoe.launch.ranks import init_ranks
    from automoe.optim.adamw import build_optimizer
    from automoe.parallel.mesh import build_meshes
    from automoe.parallel.parallelize import build_parts
    from automoe.parallel.pipeline import build_runner
    from automoe.run.weights import load_or_initialize
    from automoe.training.state import TrainState
    from automoe.training.step import forward_backward, optimizer_step, prepare_inputs

    peer, _, world, rows = CASES[case]
    overrides = [
        *(f"mesh.dp_shard={world}", f"mesh.ep={world}", "mesh.pp=1", f"launch.num_ranks={world}", "launch.device=cpu"),
        *(f"train.seq_len={seq_len}", f"train.micro_batch_size={rows}", f"train.global_batch_size={world * rows}"),
        *("train.dtype=float32", "train.grad_clip=1.0e9", "moe.bias_update_rate=0"),
        *(f"optim.lr={LR}", "optim.warmup_steps=0", "optim.schedule=constant", "optim.weight_decay=0"),
        *("data=benchmark", f"model.hf_path={folder / 'adapter' if peer == 'peft' else folder}"),
        *(["lora.rank=8", "lora.alpha=16"] if peer == "peft" else []),
    ]
    config = compose(Arguments(overrides=overrides))
    launch = replace(config.launch, device="cpu", threads_per_rank=1)
    device = init_ranks(launch, rank, world, rank, folder / "ours.store")
    meshes = build_meshes(resolve_mesh(config.mesh, world), device)
    parts = build_parts(config, meshes)
    load_or_initialize(parts, config, device)
    runner = build_runner(parts, meshes, config, device)
    state = TrainState(parts, build_optimizer(list(parts.values()), config.optim, 0))
    batches = rows_of(rank, rows, seq_len)

    def step() -> float:
        tokens, labels = next(batches)
        positions = torch.arange(seq_len).expand(tokens.shape)
        batch = StepBatch(tokens, labels, positions, torch.zeros_like(tokens), tokens.numel(), 0)
        inputs, trained = prepare_inputs(batch, meshes, config, device)
        stats = forward_backward(state, runner, inputs, config)
        optimizer_step(state, stats, trained, meshes, config)
        return stats.loss

    return step


def theirs(case: str, folder: Path, rank: int, seq_len: int) -> Step:
    """Build the same step of peft, or of transformers' own FSDP2 and expert parallelism.

    AdamW is fused on one rank; torch refuses that for parameters on two meshes.
    """
    import torch.distributed as dist
    import transformers

    peer, _, world, rows = CASES[case]
    options: dict[str, Any] = {}
    if world > 1:
        from transformers.distributed import DistributedConfig

        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        store = dist.FileStore(str(folder / "theirs.store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        options["distributed_config"] = DistributedConfig(fsdp_size=world, ep_size=world)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa", **options
    )
    model.config.use_cache = False
    if peer == "peft":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=world == 1)
    batches = rows_of(rank, rows, seq_len)

    def step() -> float:
        tokens, labels = next(batches)
        loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        return float(mean) / world

    return step


def serve_trainer(folder: Path, rows: int, seq_len: int, answer: Callable[[float | None], None]) -> None:
    """Run transformers' ``Trainer``, which asks for its turn after each of its steps.

    Args:
        answer: called with the loss after a step, and with None before the first.
    """
    import transformers

    batches = rows_of(0, rows, seq_len)

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for tokens, labels in batches:
                for row, label in zip(tokens, labels, strict=True):
                    # The model shifts labels itself.
                    yield {"input_ids": row, "labels": torch.cat([label.new_full((1,), -100), label[:-1]])}

    class Turns(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            answer(None)

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                answer(float(logs["loss"]))

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa"
    )
    args = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=10**6,
        per_device_train_batch_size=rows,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1e9,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(model, args, train_dataset=Rows(), callbacks=[Turns()]).train()


def serve(case: str, who: str, folder: Path, rank: int, seq_len: int) -> None:
    """Step once for each line of the input, and answer each with a line of JSON: loss, CPU seconds, memory in MB."""
    loaded, began, steps = 0.0, 0.0, 0

    def answer(loss: float | None) -> None:
        nonlocal loaded, began, steps
        used = time.process_time() - began
        if loss is None:
            loaded = memory("VmRSS")
        else:
            steps += 1
            print(
                "=" + json.dumps({"loss": loss, "seconds": used, "loaded": loaded, "peak": memory("VmHWM")}), flush=True
            )
        if steps == UNTIMED:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        if sys.stdin.readline() != "step\n":
            os._exit(0)
        began = time.process_time()

    if CASES[case][0] == "trainer" and who == "theirs":
        serve_trainer(folder, CASES[case][3], seq_len, answer)
    step = (ours if who == "ours" else theirs)(case, folder, rank, seq_len)
    answer(None)
    while True:
        answer(step())


class Contender:
    """The processes of ``who`` in ``case``, one a rank."""

    def __init__(self, case: str, who: str, folder: Path, seq_len: int) -> None:
        words = [
            sys.executable,
            __file__,
            "--case",
            case,
            "--serve",
            who,
            "--folder",
            str(folder),
            "--seq-len",
            str(seq_len),
        ]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = [subprocess.Popen([*words, "--rank", str(rank)], **pipes) for rank in range(CASES[case][2])]
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peaks: list[float] = []
        self.above: list[float] = []

    def step(self) -> None:
        """Take one step on all ranks."""
        for rank in self.ranks:
            print("step", file=rank.stdin, flush=True)
        answers = []
        for rank in self.ranks:
            line = next((line for line in rank.stdout if line.startswith("=")), None)
            if line is None:
                raise SystemExit("a contender's process died: see above")
            answers.append(json.loads(line[1:]))
        self.losses.append(answers[0]["loss"])
        self.seconds.append(sum(each["seconds"] for each in answers))
        self.peaks.append(max(each["peak"] for each in answers))
        self.above.append(max(each["peak"] - each["loaded"] for each in answers))

    def stop(self) -> None:
        """End the processes, and wait until they have gone."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def measure(case: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Return what one case took, step by step."""
    peer, experts, ranks, rows = CASES[case]
    seq_len = 64 if quick else 512
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder, experts, quick, peer == "peft")
        both = {"automoe": Contender(case, "ours", folder, seq_len), peer: Contender(case, "theirs", folder, seq_len)}
        try:
            for _ in range(UNTIMED + rounds):
                for contender in both.values():
                    contender.step()
        finally:
            for contender in both.values():
                contender.stop()
    mine, other = both.values()
    worst = max(abs(a - b) / abs(b) for a, b in zip(mine.losses, other.losses, strict=True))
    if not worst <= GATE:
        pairs = list(zip(mine.losses, other.losses, strict=True))
        raise SystemExit(f"{case}: losses differ by up to {worst:.1e}; {GATE:.0e} is allowed: {pairs}")
    ratios = [b / a for a, b in zip(mine.seconds[UNTIMED:], other.seconds[UNTIMED:], strict=True)]
    return {
        "peer": peer,
        "experts": experts,
        "ranks": ranks,
        "rows_of_a_rank": rows,
        "seq_len": seq_len,
        "losses": {who: each.losses for who, each in both.items()},
        "largest_loss_difference": worst,
        "step_seconds": {who: each.seconds[UNTIMED:] for who, each in both.items()},
        "peak_mb": {who: each.peaks[-1] for who, each in both.items()},
        "peak_mb_above_the_loaded_model": {who: each.above[-1] for who, each in both.items()},
        "peer_over_automoe": median(ratios),
        "peer_over_automoe_range": [min(ratios), max(ratios)],
        "memory_over_peer": mine.peaks[-1] / other.peaks[-1],
        "memory_above_the_model_over_peer": mine.above[-1] / other.above[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models: checks the script, not speed")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each contender (default 9)")
    parser.add_argument("--case", choices=CASES, action="append", help="only this case; may be repeated")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--serve", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seq-len", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    if args.serve:
        serve(args.case[0], args.serve, args.folder, args.rank, args.seq_len)
    report: dict[str, Any] = {
        "what": "training steps beside peers with equal losses: CPU seconds of all ranks, peak memory of the largest",
        "quick": args.quick,
        "commit": commit("../automoe", "peer_steps.py"),
        "cpu": cpu_model(),
        "dtype": "float32",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "accelerate")},
        "gate_tolerance": GATE,
        "cases": {},
    }
    for case in args.case or CASES:
        report["cases"][case] = seen = measure(case, 2 if args.quick else args.rounds, args.quick)
        low, high = seen["peer_over_automoe_range"]
        print(
            f"{case}: {seen['peer']} takes {seen['peer_over_automoe']:.2f} ({low:.2f}-{high:.2f}) times our CPU seconds; "
            f"peak memory, ours over its: {seen['memory_over_peer']:.2f}, above the loaded model "
            f"{seen['memory_above_the_model_over_peer']:.2f}; losses differ by {seen['largest_loss_difference']:.1e}"
        )
    out = result_file(args.out, "peer_steps", args.quick)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
