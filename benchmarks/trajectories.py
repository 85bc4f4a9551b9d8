"""Losses, gradient norms and trained tensors of many small runs, to hold one commit against another, bit for bit.

    python benchmarks/trajectories.py record before.json     # on one commit
    python benchmarks/trajectories.py compare before.json    # on another: runs them again

A run is started by the command that users type, so the same script serves commits whose insides differ. It keeps
what ``metrics.jsonl`` says of each step and the SHA-256 of each tensor of the last checkpoint: parameters, moments of
the optimizer, balance state, scales. Bits depend on the processor and on torch, so both sides run on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SIZES = (
    "train.steps=4 train.seq_len=64 train.global_batch_size=8 train.micro_batch_size=2 train.val_every=2 "
    "train.val_batches=1 data.max_bytes=200000 checkpoint.every=4 checkpoint.export_hf=false observe.report=false "
    "optim.warmup_steps=2"
)
ONE = "mesh.pp=1 mesh.ep=1 launch.num_ranks=1"
KEPT = (
    "loss", "grad_norm", "lr", "tokens", "skipped", "val_loss", "val_bits_per_byte", "seq_balance_loss",
    "global_balance_loss", "micro_batch_balance_loss", "z_loss", "dropped_share", "fp8_clipped_share",
)  # fmt: skip

# A dense checkpoint, written once, and a mixture of experts that starts from it.
DENSE = "model=small_llama mesh.pp=1 mesh.ep=1 train.steps=1 checkpoint.export_hf=true observe.report=false"
# What a run from a checkpoint takes by default has changed, so it is named.
NAMED = "data=stdlib optim.weight_decay=0.1 moe.seq_balance_coef=1e-3 moe.bias_update_rate=1e-2"
UPCYCLED = f"model.hf_path={{dense}} model.upcycle=true model.num_experts_per_token=2 optim.lr=1e-3 {NAMED}"

# name: what is typed behind `automoe train`
CASES = {
    "default": "",
    "one_rank": ONE,
    "float64_loop": f"{ONE} train.dtype=float64 moe.experts=loop",
    "bfloat16": "train.dtype=bfloat16",
    "bfloat16_stochastic": "train.dtype=bfloat16 optim.master_weights=stochastic optim.moments=bfloat16",
    "one_rank_stochastic": f"{ONE} train.micro_batch_size=8 train.dtype=bfloat16 optim.master_weights=stochastic",
    "fsdp_ep4": "mesh.pp=1 mesh.ep=4",
    "hsdp": "mesh=hsdp2_ep2",
    "tp2_etp2": "mesh.pp=1 mesh.tp=2 mesh.etp=2 mesh.ep=1",
    "cp2_ep4": "mesh=cp2_ep4",
    "interleaved": "experiment=interleaved train.micro_batch_size=1 mesh.ep=1",
    "gpipe": "parallel.schedule=GPipe",
    "allgather": "mesh.pp=1 mesh.ep=2 moe.dispatcher=allgather",
    "reshard_micro_batch": "mesh.pp=1 mesh.ep=2 parallel.reshard=micro_batch parallel.grad_sync=micro_batch",
    "qwen3_moe": "model=small_qwen3_moe mesh.pp=1 mesh.ep=2",
    "qwen2_moe": "model=small_qwen2_moe",
    "mixtral": "model=small_mixtral mesh.pp=1 mesh.ep=2 mesh.tp=2",
    "glm4_moe": "model=small_glm4_moe",
    "gpt_oss": "model=small_gpt_oss mesh.pp=1 mesh.ep=2",
    "qwen3_next": "model=small_qwen3_next mesh.pp=1 mesh.ep=2 data.document_mask=false",
    "llama": "model=small_llama mesh.pp=1 mesh.ep=1 mesh.tp=2",
    "recompute_full": "parallel.recompute=full",
    "recompute_named": "parallel.recompute=[core_attn,moe_act,layernorm,mla_up_proj,mlp]",
    "recompute_moe": "mesh.pp=1 mesh.ep=2 parallel.recompute=[moe,shared_experts]",
    "drop_sequence": "moe.capacity_factor=1.0 moe.drop_scope=sequence",
    "drop_rank_padded": "mesh.pp=1 mesh.ep=2 moe.capacity_factor=1.2 moe.pad_to_capacity=true",
    "all_balance_losses": (
        "moe.global_balance_coef=1e-2 moe.micro_batch_balance_coef=1e-2 moe.z_loss_coef=1e-3 moe.router_jitter=0.1"
    ),
    "fp8_tensorwise": "train.dtype=bfloat16 train.fp8=tensorwise mesh.pp=1 mesh.ep=2",
    "fp8_delayed": "train.dtype=bfloat16 train.fp8=delayed",
    "fp8_blockwise": "train.fp8=blockwise mesh.pp=1 mesh.ep=2 model.hidden_size=256 model.moe_intermediate_size=128",
    "skipped_steps": "train.spike_factor=0.01 train.spike_window=4 train.steps=8 checkpoint.every=8 optim.lr=1e-2",
    "compiled_zipf": "moe.gate=zipf mesh.pp=1 mesh.ep=4",
    "hierarchical": "mesh.pp=1 mesh.ep=4 moe.dispatcher=hierarchical cluster.gpus_per_node=2",
    "ema": "mesh.pp=1 mesh.ep=2 optim.ema_decay=0.9",
    "sft": "--config-name sft_small checkpoint=regular train.seq_len=512",
    "dpo": "--config-name dpo_small checkpoint=regular train.seq_len=512",
    "dpo_lora": "--config-name dpo_small checkpoint=regular train.seq_len=512 lora.rank=4 mesh.tp=2 mesh.ep=2",
    "lora": "model=small_qwen3_moe lora.rank=4 lora.dropout=0.1 mesh.pp=2 mesh.ep=2",
    "lora_etp": "lora.rank=4 mesh.pp=1 mesh.tp=2 mesh.etp=2 mesh.ep=1",
    "lora_nf4": (
        f"model.hf_path={{dense}} {NAMED} optim.lr=3e-3 lora.rank=8 lora.base=nf4 mesh.pp=1 mesh.ep=1 train.dtype=bfloat16"
    ),
    "upcycled": f"{UPCYCLED} model.num_experts=8 model.moe_intermediate_size=512 mesh.pp=1 mesh.ep=4",
    "upcycled_lora": f"{UPCYCLED} model.num_experts=16 model.moe_intermediate_size=256 lora.rank=4 mesh.ep=2",
}


def train(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run ``automoe train`` of this checkout."""
    return subprocess.run(
        [sys.executable, "-m", "automoe.train", *words],
        cwd=HERE,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run(name: str, folder: Path, dense: Path) -> dict[str, object]:
    """Train one case in ``folder``: its records and the hash of each tensor of its checkpoint."""
    done = train([*SIZES.split(), *CASES[name].format(dense=dense).split(), f"run_dir={folder}"])
    if done.returncode:
        return {"error": "\n".join(done.stdout.strip().splitlines()[-5:])}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [{key: line[key] for key in KEPT if key in line} for line in lines]
    [step] = (folder / "checkpoints").glob("step-*")
    return {"records": records, "tensors": hash_tensors(step)}


def hash_tensors(step: Path) -> dict[str, str]:
    """Start of the SHA-256 of each tensor of a checkpoint by its name, whatever mesh wrote it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    [folder] = {path.parent for path in step.rglob(".metadata")}
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(("model.", "optimizer."))
    }
    assert tensors, folder
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in tensors.items()
    }


def differences(before: dict, after: dict) -> list[str]:
    """What is not the same of two runs of one case, a line each."""
    if "error" in before or "error" in after:
        return [f"{side}: {run['error']}" for side, run in (("before", before), ("after", after)) if "error" in run]
    found = []
    for step, (old, new) in enumerate(zip(before["records"], after["records"], strict=True), start=1):
        found += [f"step {step} {k}: {old.get(k)} -> {new.get(k)}" for k in old | new if old.get(k) != new.get(k)]
    old, new = before["tensors"], after["tensors"]
    found += [f"{name}: {old.get(name)} -> {new.get(name)}" for name in old | new if old.get(name) != new.get(name)]
    return found


def main() -> int:
    """0: recorded without an error, or equal to what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--keep", type=Path, help="compare: write what was compared to this file")
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    from benchmarks import measuring

    expected = json.loads(args.file.read_text()) if args.action == "compare" else None
    results, wrong = {}, 0
    kept = tempfile.TemporaryDirectory()
    dense = Path(kept.name) / "dense"
    if (
        any("{dense}" in CASES[name] for name in args.only)
        and (made := train([*DENSE.split(), f"run_dir={dense}"])).returncode
    ):
        sys.exit(made.stdout)
    for name in args.only:
        with tempfile.TemporaryDirectory() as scratch:
            results[name] = run(name, Path(scratch) / "run", dense / "hf")
        found = differences(expected["cases"][name], results[name]) if expected else []
        if "error" in results[name]:
            found = found or [str(results[name]["error"])]
        wrong += bool(found)
        print(f"{name}: {'DIFFERENT' if found else 'ok'}", flush=True)
        for line in found[:5]:
            print(f"    {line}", flush=True)
    content = {
        "provenance": {"commit": measuring.commit("../automoe"), "cpu": measuring.cpu_model()},
        "sizes": SIZES,
        "commands": CASES,
        "cases": results,
    }
    if args.action == "record":
        args.file.write_text(json.dumps(content, indent=1) + "\n")
    elif args.keep:
        args.keep.write_text(
            json.dumps({"provenance": [expected["provenance"], content["provenance"]], "different": wrong,
                        "sizes": SIZES, "commands": CASES,
                        "losses": {n: [r["loss"] for r in c.get("records", [])] for n, c in results.items()},
                        "grad_norms": {n: [r["grad_norm"] for r in c.get("records", [])] for n, c in results.items()},
                        "num_tensors": {n: len(c.get("tensors", [])) for n, c in results.items()}}, indent=1) + "\n"
        )  # fmt: skip
    print(f"{len(results) - wrong} of {len(results)} without a difference or an error")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
