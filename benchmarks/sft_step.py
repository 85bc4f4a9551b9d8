"""Tokens per CPU second of supervised fine-tuning on one core, ours and TRL's ``SFTTrainer``, the same packed rows.

Both train the same model from the same weights on the same rows, 20 steps of AdamW at a constant rate, in float32, one
process and one thread, and take turns, step by step, so that noise of the machine meets both. A step is all that a trainer
does from the end of one update to the end of the next: rows, forward, backward, clipping, update, records of its own. The
losses of all steps must be equal, else nothing is reported. Also how full rows are after packing a realistic mix of lengths.

    python benchmarks/sft_step.py             # about four minutes; writes benchmarks/results/sft_step.json
    python benchmarks/sft_step.py --quick     # seconds: a small model, to check the script itself
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from contenders import transformers_model
from measuring import commit, cpu_model

from automoe.comm.tokens import IGNORE
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    Config,
    LaunchConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from automoe.data.loader import Loader
from automoe.data.packing import best_fit
from automoe.data.tokenizer import ByteTokenizer
from automoe.launch.ranks import init_ranks, store_file
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.parallel.pipeline import build_runner
from automoe.run.weights import load_or_initialize
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs

GATE = 1e-4  # relative difference of every step's loss that is accepted
STEPS, UNTIMED = 20, 2
HERE = Path(__file__).resolve().parent


def model(vocab: int, layers: int, hidden: int) -> ModelConfig:
    """Qwen3-MoE's shape."""
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_experts=16,
        num_experts_per_token=4,
        moe_intermediate_size=hidden // 2,
        attention=AttentionConfig(kind="gqa", num_heads=8, num_kv_heads=2, head_dim=hidden // 8, qk_norm=True),
    )


def sft_config(size: dict[str, int], checkpoint: Path, rows: int, seq_len: int) -> Config:
    data = DataConfig(kind="stdlib_chat", on_long="drop", val_fraction=0.0, tokenizer="byte")
    data.chat.template = "plain"
    return Config(
        mesh=MeshConfig(dp_shard=1),
        model=replace(model(**size), hf_path=str(checkpoint)),
        train=TrainConfig(steps=STEPS, seq_len=seq_len, global_batch_size=rows, micro_batch_size=rows, val_every=0),
        optim=OptimConfig(lr=1e-4, warmup_steps=0, schedule="constant", weight_decay=0.0),
        data=data,
    )


class Ours:
    """The steps of ``recipes/pretrain.py`` on one rank."""

    def __init__(self, config: Config) -> None:
        self.config, self.device = config, torch.device("cpu")
        self.meshes = build_meshes(resolve_mesh(config.mesh, 1), self.device)
        parts = build_parts(config, self.meshes)
        load_or_initialize(parts, config, self.device)
        self.runner = build_runner(parts, self.meshes, config, self.device)
        self.loader = Loader(config, 0, 1)
        self.state = TrainState(parts, build_optimizer(list(parts.values()), config.optim, 0), self.loader)

    def step(self) -> float:
        batch = self.loader.next_step()
        inputs, trained = prepare_inputs(batch, self.meshes, self.config, self.device)
        stats = forward_backward(self.state, self.runner, inputs, self.config)
        optimizer_step(self.state, stats, trained, self.meshes, self.config)
        return stats.loss


def packed_rows(config: Config) -> list[dict[str, Any]]:
    """The rows of all steps as ``transformers`` takes them: a label stands where its token is."""
    loader, found = Loader(config, 0, 1), []
    for _ in range(STEPS):
        batch = loader.next_step()
        labels = torch.full_like(batch.labels, IGNORE)
        labels[:, 1:] = batch.labels[:, :-1]
        columns = (batch.tokens, labels, batch.positions)
        found += [
            dict(zip(("input_ids", "labels", "position_ids"), row, strict=True)) for row in zip(*columns, strict=True)
        ]
    return found


def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(np.array([row[name] for row in rows])) for name in rows[0]}


def train_in_turns(config: Config, folder: Path) -> dict[str, dict[str, list[float]]]:
    """CPU seconds and losses of every step of both; each step of TRL's is followed by one of ours."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    ours = Ours(config)
    seen: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "losses": []} for name in ("automoe", "trl")}
    clock = [0.0]

    class Turns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock[0] = time.process_time()

        def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" not in logs:
                return
            seen["trl"]["losses"].append(float(logs["loss"]))
            seen["trl"]["seconds"].append(time.process_time() - clock[0])
            start = time.process_time()
            seen["automoe"]["losses"].append(ours.step())
            clock[0] = time.process_time()
            seen["automoe"]["seconds"].append(clock[0] - start)

    for name, content in ByteTokenizer.files().items():
        (folder / name).write_text(content)
    rows = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in packed_rows(config)])
    args = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=config.train.global_batch_size,
        learning_rate=config.optim.lr,
        lr_scheduler_type="constant",
        adam_beta1=config.optim.betas[0],
        adam_beta2=config.optim.betas[1],
        adam_epsilon=config.optim.eps,
        max_grad_norm=config.train.grad_clip,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        router_aux_loss_coef=0.0,
        max_length=None,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args,
        data_collator=stack,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Turns()],
    )
    trainer.train()
    return seen


def packing() -> dict[str, Any]:
    """How full rows of 4,096 tokens are, ours and with TRL's best-fit decreasing, for 20,000 samples of two mixes."""
    from datasets import Dataset
    from trl import pack_dataset

    generator, found = np.random.default_rng(0), {}
    mixes = {
        "chat: log-normal, median 400, a tenth above 1,450": generator.lognormal(6.0, 1.0, 20_000),
        "short answers with a few long documents": np.where(
            generator.random(20_000) < 0.9, generator.lognormal(4.5, 0.6, 20_000), generator.lognormal(7.6, 0.5, 20_000)
        ),
    }
    for name, drawn in mixes.items():
        lengths = np.clip(drawn, 8, 4096).astype(np.int64)
        rows = best_fit(np.sort(lengths)[::-1], 4096).max() + 1
        theirs = pack_dataset(Dataset.from_dict({"input_ids": [[0] * n for n in lengths[:4000]]}), 4096, strategy="bfd")
        ours = best_fit(np.sort(lengths[:4000])[::-1], 4096).max() + 1
        found[name] = {
            "samples": len(lengths),
            "tokens": int(lengths.sum()),
            "rows": int(rows),
            "efficiency": float(lengths.sum() / (rows * 4096)),
            "first_4000": {
                "automoe": float(lengths[:4000].sum() / (ours * 4096)),
                "trl bfd": float(lengths[:4000].sum() / (len(theirs) * 4096)),
            },
        }
    return found


def measure(size: dict[str, int], rows: int, seq_len: int) -> dict[str, Any]:
    with TemporaryDirectory() as name, store_file() as store:
        folder = Path(name)
        torch.manual_seed(0)
        transformers_model(model(**size), "grouped_mm").save_pretrained(folder)
        init_ranks(LaunchConfig(device="cpu", threads_per_rank=1), 0, 1, 0, store)
        config = sft_config(size, folder, rows, seq_len)
        seen = train_in_turns(config, folder)
        trained = sum(sum(label != IGNORE for label in row["labels"].tolist()) for row in packed_rows(config))
        dist.destroy_process_group()
    pairs = list(zip(seen["automoe"]["losses"], seen["trl"]["losses"], strict=True))
    worst = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
    if len(pairs) != STEPS or worst > GATE:
        raise SystemExit(f"losses of {len(pairs)} steps differ by up to {worst:.1e}; {GATE:.0e} is allowed: {pairs}")
    timed = {name: of_one["seconds"][UNTIMED:] for name, of_one in seen.items()}
    ratios = [theirs / mine for mine, theirs in zip(timed["automoe"], timed["trl"], strict=True)]
    return {
        "config": repr(replace(config.model, hf_path=None)),
        "rows": rows,
        "seq_len": seq_len,
        "trained_share": trained / (STEPS * rows * seq_len),
        "losses": {name: of_one["losses"] for name, of_one in seen.items()},
        "largest_loss_difference": worst,
        "tokens_per_cpu_second": {name: rows * seq_len / median(seconds) for name, seconds in timed.items()},
        "step_seconds": timed,
        "ours_over_trl": median(ratios),
        "ours_over_trl_range": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model: checks the script, not speed")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "sft_step.json", help="where the JSON goes")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    size = dict(vocab=512, layers=2, hidden=64) if args.quick else dict(vocab=8192, layers=4, hidden=256)
    report: dict[str, Any] = {
        "what": "tokens per CPU second of a step of supervised fine-tuning: rows, forward, backward, clipping, AdamW",
        "quick": args.quick,
        "commit": commit(
            "../automoe/model", "../automoe/moe", "../automoe/optim", "../automoe/training", "sft_step.py"
        ),
        "cpu": cpu_model(),
        "threads": 1,
        "dtype": "float32",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")},
        "gate_tolerance": GATE,
        "step": measure(size, *((2, 128) if args.quick else (4, 512))),
        "packing": packing(),
    }
    step = report["step"]
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in step["tokens_per_cpu_second"].items())
    low, high = step["ours_over_trl_range"]
    print(f"tokens per CPU second: {rates}; ours over TRL's {step['ours_over_trl']:.2f} ({low:.2f}-{high:.2f})")
    print(f"losses of {STEPS} steps differ by at most {step['largest_loss_difference']:.1e}")
    for name, mix in report["packing"].items():
        print(f"rows {mix['efficiency']:.1%} full: {name}; of the first 4,000 samples {mix['first_4000']}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
