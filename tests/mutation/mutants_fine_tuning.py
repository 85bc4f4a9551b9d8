"""Mistakes in adapters, preferences, averages and Muon."""

from __future__ import annotations

from typing import Any

from mutant import Mutant

LORA, STACKS = ["tests/model/test_lora.py"], ["tests/moe/test_expert_lora.py"]
LEAVES = ["tests/hf/test_lora_export.py"]
LORA_MESH = [
    "tests/mesh/test_mesh_float64.py::test_a_mesh_trains_like_one_rank"
    "[deepseek-dp_shard2-tp2-ep2-etp2-mb2-alltoall-rank=4-dropout=0.25]"
]
SHARED_HEADS = [  # four tp ranks hold two key/value heads whole, and compute rows of them
    "tests/mesh/test_mesh_float64.py::test_every_other_mesh_trains_like_one_rank"
    "[qwen3-tp4-ep4-mb4-allgather-recompute=full-rank=4-dropout=0.25]"
]
TRL = [
    f"tests/recipes/test_dpo.py::test_tokens_loss_rewards_and_gradients_are_trls[{kind}]" for kind in ("sigmoid", "ipo")
]
KNOWN = ["tests/recipes/test_dpo.py::test_the_reference_is_kept_and_known_again"]
LOG_TWO = ["tests/recipes/test_dpo.py::test_a_step_without_steps_starts_at_log_two_and_counts_padding_rows_for_nothing"]
EMA, MUON, MUON_MESH = ["tests/optim/test_ema.py"], ["tests/optim/test_muon.py"], ["tests/mesh/test_mesh_muon.py"]
RESUME = ["tests/checkpoint/test_resume.py::test_same_mesh_to_the_bit[muon]"]
SIZE = ["tests/checkpoint/test_checkpoint_size.py"]
MEMORY = ["tests/planner/test_measured_memory.py"]

_FOLDERS: dict[str, list[tuple[Any, ...]]] = {
    "automoe/model": [
        ("lora.py", "* self.scale", "", LORA_MESH + LEAVES),
        ("lora.py", "take_rows(b_Or, rows)", "b_Or", SHARED_HEADS),
        ("lora.py", "bound = 1 / sqrt(parameter.shape[-1])", "bound = 0.0", LORA),
        ("lora.py", 'if name.startswith("B"):', 'if name.startswith("A"):', LORA),
        ("lora.py", "each_b @ each_a, alpha=scale", "each_b @ each_a", LEAVES),
        ("lora.py", "local_shard(b).zero_()", "pass", LEAVES),
        ("lora.py", 'stored = parameter if ".router." in name', 'stored = parameter if ".nothing." in name', LORA),
        ("params.py", "tp=1 if target.tp == 1 else None", "tp=None", LORA_MESH),
        (
            "params.py",
            'ParamSpec("lora.B13", "E 2 I r", etp=2, fsdp=2)',
            'ParamSpec("lora.B13", "E 2 I r", fsdp=2)',
            LORA_MESH,
        ),
        ("param_spec.py", 'in_layer = self.part not in ("embedding", "head")', "in_layer = True", MUON_MESH),
    ],
    "automoe/training": [
        ("preference.py", "return -sums, lengths", "return sums, lengths", TRL),
        ("preference.py", "log_probs - reference, 0.0", "log_probs, 0.0", TRL + LOG_TWO),
        ("preference.py", "inputs.counts.documents // 2", "inputs.counts.documents", TRL),
        ("preference.py", "1 / (2 * self.beta)", "1 / self.beta", TRL),
        ("preference.py", "gained = gained / lengths.clamp_min(1)", "pass", TRL),
        ("preference.py", "there_BP = lengths[..., 0] > 0", "there_BP = lengths[..., 0] >= 0", LOG_TWO),
        ("preference.py", "margins > 0,", "margins < 0,", TRL),
    ],
    "automoe/optim": [
        ("ema.py", "if ema.dtype != weight.dtype:", "if False:", EMA),
        ("ema.py", "weight.copy_(kept)", "pass", EMA),
        (
            "muon.py",
            "tall = matrices.shape[-2] > matrices.shape[-1]",
            "tall = False",
            MUON_MESH + MUON,
            "a matrix and its transpose give the same update; the narrow side's products are fewer",
        ),
        ("muon.py", 'update = gradient.add(momentum, alpha=group["momentum"])', "update = momentum.clone()", MUON_MESH),
        ("muon.py", "_RMS * max(m, n) ** 0.5", "_RMS * min(m, n) ** 0.5", MUON_MESH),
        ("muon.py", '1 - group["lr"] * group["weight_decay"]', '1 - group["weight_decay"]', MUON_MESH),
        ("muon.py", "work[owner] += self._work(i)", "pass", MUON_MESH),
        ("muon.py", "if owner in replicas else replicas[owner % len(replicas)]", "", MUON_MESH),
        ("muon.py", "parameter.grad = None", "pass", MUON_MESH + MUON),
        ("muon.py", "left -= parameter.numel()", "pass", MUON),
        ("adamw.py", "optim.momentum}", "0.5}", MUON_MESH),
    ],
    "automoe/planner": [
        (
            "step_memory.py",
            'return 1 if self.config.optim.algorithm == "muon"',
            'return 2 if self.config.optim.algorithm == "muon"',
            SIZE + MEMORY,
        ),
        ("memory.py", "copies = 2 * (total + of_one_shape)", "copies = 2 * total", MEMORY),
    ],
}
FINE_TUNING = [Mutant(f"{folder}/{file}", *rest) for folder, rows in _FOLDERS.items() for file, *rest in rows]
