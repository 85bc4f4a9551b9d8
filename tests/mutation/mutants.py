"""Mistakes of one line, each with the tests that should notice it. ``run.py`` puts them in, one after the other.

A fragment of a line is enough, as long as the file has it once (``test_mutants_apply`` sees to that). Tests are the
fastest that should see the mistake, not all that would. A mutant that no test can see says why it may live.
"""

from __future__ import annotations

from mutant import Mutant, loop
from mutants_config import CONFIG
from mutants_data import DATA
from mutants_exports import EXPORTS
from mutants_fine_tuning import FINE_TUNING
from mutants_planner import PLANNER

LLAMA, QWEN, DSV3, GPT_OSS, NEXT = (loop(c) for c in ("llama", "qwen3_moe", "dsv3", "gpt_oss", "qwen3_next"))
ADAMW, NORM, SKIP = ["tests/optim/test_adamw.py"], ["tests/optim/test_grad_norm.py"], ["tests/training/test_skip.py"]
DECAY, SCHEDULE = ["tests/optim/test_decay_groups.py"], ["tests/optim/test_schedule.py"]
NORM_KERNELS = ["tests/gpu/test_device_norm.py"]
STOCHASTIC = ["tests/optim/test_stochastic.py"]
ROUTER, BALANCE = ["tests/moe/test_router.py"], ["tests/moe/test_balance.py"]
PROPERTIES, EXPERTS = ["tests/moe/test_routing_properties.py"], ["tests/moe/test_experts.py"]
DISPATCH, GATES = ["tests/moe/test_dispatch.py"], ["tests/moe/test_gates.py"]
JITTER = ["tests/moe/test_jitter_and_ties.py"]
DTYPES = ["tests/parallel/test_gradient_dtypes.py"]
COMMIT = ["tests/checkpoint/test_commit_order.py"]
RESUME = ["tests/checkpoint/test_resume.py::test_same_mesh_to_the_bit[muon]"]
RETENTION, DAMAGE = ["tests/checkpoint/test_retention.py"], ["tests/checkpoint/test_checkpoint_damage.py"]
STREAK = ["tests/recipes/test_skipped_streak.py"]
LEAVE = ["tests/hf/test_hf_export.py::test_experts_leave_as_they_are_published_however_they_came"]
PARITY, EXPORT = ["tests/hf/test_hf_parity.py"], ["tests/hf/test_hf_export.py"]
REGISTRY, QUANTIZED = ["tests/hf/test_hf_registry.py"], ["tests/hf/test_hf_quantized.py"]
FORMATS, FP8 = ["tests/quantize/test_fp8_formats.py"], ["tests/quantize/test_fp8_layers.py"]
INIT, NORMS = ["tests/model/test_init.py"], ["tests/model/test_rms_norm.py"]
LOSS, MASKS = ["tests/model/test_cross_entropy.py"], ["tests/model/test_attention_masks.py"]
BLOCKS = ["tests/model/test_block_masks.py"]
ROPE = ["tests/model/test_rope.py"]
FUSED = ["tests/hf/test_hf_parity.py::test_equal_to_transformers[fused-qwen3_moe]"]
READ = ["tests/hf/test_hf_walk.py::test_what_was_once_read_otherwise"]
RATES, CLIP = ["tests/optim/test_schedule.py"], ["tests/mesh/test_mesh_qk_clip.py"]
OVERLAP = ["tests/mesh/test_mesh_overlap.py"]
MESH = "tests/mesh/test_mesh_float64.py::test_a_mesh_trains_like_one_rank"


def parity(name: str) -> list[str]:
    return [f"tests/hf/test_hf_parity.py::test_equal_to_transformers[per_expert-{name}]"]


_OPTIM = [
    ("adamw.py", "lr_ratio - before) * share", "lr_ratio - before) * done", RATES),
    ("adamw.py", "before, first = phase.lr_ratio,", "before, first = 1.0,", RATES),
    ("qk_clip.py", "[gamma.sqrt()] * module.nope_dim", "[gamma] * module.nope_dim", CLIP),
    ("qk_clip.py", "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.MIN", ["tests/mesh/test_mesh_float64.py"]),
    ("adamw.py", "if decays else 0.0", "if decays else optim.weight_decay", DECAY),
    ("adamw.py", "betas=optim.betas", "betas=optim.betas[::-1]", LLAMA),
    ("adamw.py", "eps=optim.eps", "eps=1e-8", LLAMA),
    ("adamw.py", "or id(parameter) in seen", "", ADAMW),
    ("adamw.py", 'group["lr"] = lr', 'optimizer.param_groups[0]["lr"] = lr', ADAMW),
    ("adamw.py", "(step + 1) / optim.warmup_steps", "step / optim.warmup_steps", QWEN),
    ("adamw.py", "if step < optim.warmup_steps", "if step <= optim.warmup_steps", SCHEDULE),
    ("adamw.py", "max(optim.warmup_steps - 1, 0)", "optim.warmup_steps", SCHEDULE),
    ("adamw.py", "(1 + cos(pi * done)) / 2", "(1 + cos(pi * done / 2)) / 2", QWEN),
    ("adamw.py", "total_steps - decay_steps) + 1", "total_steps - decay_steps)", SCHEDULE),
    ("adamw.py", "optim.lr * optim.min_lr_ratio", "optim.min_lr_ratio", QWEN),
    ("grad_norm.py", "torch.dot(widened, widened)", "widened.abs().sum()", NORM),
    ("grad_norm.py", "dist.all_reduce(total, group=pp_group)", "pass", NORM),
    ("grad_norm.py", "not placement.is_replicate()", "True", NORM),
    ("grad_norm.py", " or norm <= max_norm", "", NORM + LLAMA),
    ("grad_norm.py", "not math.isfinite(norm)", "not norm > 0", NORM),
    ("stochastic.py", "(bits & dropped)", "(bits & (dropped >> 1))", STOCHASTIC),
    ("stochastic.py", "1 - beta2**steps", "1 - beta1**steps", STOCHASTIC),
    ("stochastic.py", 'group["lr"] * group["weight_decay"]', 'group["weight_decay"]', STOCHASTIC),
    ("stochastic.py", 'f"rounding.{name}"', '"rounding"', STOCHASTIC),
]
_TRAINING = [
    ("step.py", "loss > threshold", "loss < threshold", SKIP),
    ("step.py", "_NORMAL = 1.4826", "_NORMAL = 1.0", SKIP),
    ("step.py", "len(recent) < train.spike_window", "len(recent) <= train.spike_window", SKIP),
    ("step.py", "math.isfinite(loss) and", "math.isfinite(loss) or", SKIP),
    ("step.py", "del recent[: -train.spike_window]", "del recent[train.spike_window :]", SKIP),
    ("automoe/checkpoint/train_state.py", '"skipped": self.skipped', '"skipped": 0', STREAK),
    ("automoe/checkpoint/train_state.py", '"tokens": self.tokens', '"tokens": self.step', STREAK),
    ("stats.py", "plain / plain.sum()", "counts / counts.sum()", DSV3),
    ("stats.py", "update_expert_bias(router.expert_bias, counts", "update_expert_bias(router.expert_bias, plain", DSV3),
    ("step.py", "learning_rate(config.optim, state.step,", "learning_rate(config.optim, state.step + 1,", QWEN),
    ("step.py", "batch.labels >= 0", "batch.labels >= -100", LLAMA),
    ("step.py", "(batch.doc_ids >= 0).sum()", "(batch.doc_ids >= -1).sum()", QWEN),
    ("step.py", "(batch.labels >= 0).sum()), int(", "(batch.labels >= 0).sum()), 0 * int(", QWEN),
    ("step.py", "clip_(state.parameters(), grad_norm, train.grad_clip)", "pass", QWEN),
    ("step.py", "state.tokens += num_label_tokens", "state.tokens += 0 if skipped else num_label_tokens", DSV3),
    ("step.py", "state.skipped + 1 if skipped", "1 if skipped", STREAK),
    ("step.py", "update_balance_state(stats, model_parts, bias_update_rate(config, state.step))", "pass", DSV3),
    ("step.py", '"nats": loss * count', '"nats": loss', LLAMA),
    ("step.py", "nats / math.log(2)", "nats * math.log(2)", LLAMA),
    ("step.py", "state.step += 1", "state.step += 0 if skipped else 1", DSV3),
    ("step.py", "state.optimizer.zero_grad()", "pass", LLAMA),
]
_RUN = [
    ("run.py", "return self.state.step - self._first_step > self.state.skipped", "return True", STREAK),
    ("run.py", "due = last or (self._save_is_due and not state.skipped)", "due = last or self._save_is_due", STREAK),
    (
        "run.py",
        "self._save_is_due |= checkpoint.every > 0 and state.step % checkpoint.every == 0",
        "pass",
        ["tests/recipes/test_pretrain_resume.py"],
    ),
    ("run.py", "step % train.val_every == 0 or step == train.steps", "step % train.val_every == 0", LLAMA),
    ("run.py", "over = state.skipped >= train.max_skipped", "over = state.skipped > train.max_skipped", STREAK),
    (
        "weights.py",
        "return load_hf(model_parts, config.model",
        "return None and load_hf(model_parts, config.model",
        LLAMA,
    ),
    ("run.py", '"lr": update.lr', '"lr": config.optim.lr', QWEN),
    ("automoe/training/record.py", "resumed.step if resumed and resumed.own else None", "None", STREAK),
    ("stats.py", "table[:, -1] / chosen.sum(1)", "table[:, -1] / chosen.sum()", ["tests/parallel/test_padding.py"]),
    ("stats.py", "layer.router.load.totals.zero_()", "pass", QWEN),
]
_RECIPES = [
    ("pretrain.py", "while state.step < train.steps", "while state.step <= train.steps", LLAMA),
    ("pretrain.py", 'record.get("val_loss"), run.stopping', 'record.get("loss"), run.stopping', LLAMA),
    ("pretrain.py", "resumed = store.load_latest(state)", "resumed = None", STREAK),
    (
        "pretrain.py",
        "optimizer_step(state, stats, num_label_tokens,",
        "optimizer_step(state, stats, train.global_batch_size * train.seq_len,",
        LLAMA,
    ),
    ("pretrain.py", "if run.validates()", "if state.step == train.steps", LLAMA),
    (
        "pretrain.py",
        "state.step < train.steps or (run.stopping and exports)",
        "state.step < train.steps",
        ["tests/recipes/test_pretrain_resume.py"],
    ),
]
_MOE = [
    ("automoe/comm/tokens.py", "return self.doc_ids >= 0", "return self.doc_ids >= -1", ROUTER),
    ("balance.py", "torch.sign(counts_E.mean() - counts_E)", "torch.sign(counts_E - counts_E.mean())", DSV3),
    ("balance.py", "counts_E.mean() - counts_E", "counts_E.median() - counts_E", DSV3),
    ("balance.py", "return grad, torch.ones(", "return grad, torch.zeros(", QWEN),
    ("balance.py", "valid_BS.unsqueeze(-1).expand_as(topk_ids_BSK).to(", "torch.ones_like(topk_ids_BSK).to(", DSV3),
    ("balance.py", '"seq_balance_loss", "global_balance_loss"', '"global_balance_loss", "seq_balance_loss"', QWEN),
    ("balance.py", ".logsumexp(-1).square()", ".logsumexp(-1)", QWEN),
    ("balance.py", "self.totals[:-1] +=", "self.totals[:-1] =", QWEN),
    ("router.py", "& ~routing.kept", "& routing.kept", PROPERTIES + ["tests/recipes/test_pretrain_routing.py"]),
    ("router.py", "scores_BSE if bias_E is None else scores_BSE + bias_E", "scores_BSE", DSV3),
    ("router.py", ".values.sum(-1)", ".values.amax(-1)", ROUTER),
    ("router.py", "masked_fill(~kept_BSG", "masked_fill(kept_BSG", ROUTER),
    ("router.py", " * config.routed_scaling_factor", "", DSV3),
    ("router.py", ".sum(-1, keepdim=True) + tiny", ".amax(-1, keepdim=True) + tiny", QWEN),
    ("router.py", "logits_BSE if config.softmax_after_topk else probs_BSE", "probs_BSE", GPT_OSS),
    ("router.py", "self.load_fractions.fill_(1.0 / self.num_experts)", "self.load_fractions.fill_(1.0)", QWEN),
    (
        "router.py",
        "topk_ids_BSK, plain_ids_BSK = save_for_recompute(",
        "plain_ids_BSK, topk_ids_BSK = save_for_recompute(",
        DSV3,
    ),
    ("router.py", "(rows.T @ grad_rows).T", "(grad_rows.T @ rows) * 0.5", DTYPES + ROUTER),
    (
        "router.py",
        "torch.promote_types(x_BSH.dtype, torch.float32)\n        dtype",
        "x_BSH.dtype\n        dtype",
        DTYPES + ROUTER,
    ),
    ("router.py", "self.moe.router_jitter * (2 * uniform - 1)", "self.moe.router_jitter * uniform", JITTER),
    ("router.py", "if self.training and torch.is_grad_enabled()", "if self.training", ROUTER),
    ("capacity.py", "num_experts, priority_GN) < capacity", "num_experts, priority_GN) <= capacity", PROPERTIES),
    ("capacity.py", "min(ceil(Fraction(repr(factor))", "min(int(Fraction(repr(factor))", PROPERTIES),
    ("capacity.py", ".argsort(dim=1, descending=True", ".argsort(dim=1, descending=False", PROPERTIES),
    ("capacity.py", "choice_C // topk_ids_TK.shape[1]", "choice_C % topk_ids_TK.shape[1]", PROPERTIES),
    ("router.py", "(experts_E - moe_index) % num_experts", "(experts_E + moe_index) % num_experts", GATES),
    (
        "activation.py",
        "silu_RI * up_RI if torch.is_grad_enabled()",
        "silu_RI + up_RI if torch.is_grad_enabled()",
        EXPERTS,
    ),
    ("activation.py", "self.limit) + 1)", "self.limit))", EXPERTS + GPT_OSS),
    ("activation.py", "mul_(up_RI), gate_RI, grad_input", "mul_(up_RI), up_RI, grad_input", EXPERTS),
    ("activation.py", "mul_(gate_RI <= self.limit)", "mul_(gate_RI <= self.limit + 1)", EXPERTS),
    ("experts.py", "out + weight", "out + 1.0", EXPERTS),
    ("gradient_sums.py", "            start = end\n", "", EXPERTS),
    ("gradient_sums.py", "if travels and self.later", "if self.later", EXPERTS),
    (
        "grouped_mm.py",
        "new_empty(0).requires_grad_(any(one.requires_grad for one in matrices))",
        "new_empty(0)",
        EXPERTS,
    ),
    ("grouped_mm.py", "grad_probs_R += bias_grad", "grad_probs_R -= bias_grad", EXPERTS),
    (
        "grouped_mm.py",
        "sum_rows(grad_rows_RH, gather_idx_R, x_TH.shape[0])",
        "sum_rows(grad_rows_RH, gather_idx_R.flip(0), x_TH.shape[0])",
        EXPERTS,
    ),
    ("row_sums.py", "out.index_add_(0", "out.index_copy_(0", DISPATCH),
    ("row_sums.py", "sort(stable=True)", "sort(descending=True)", ["tests/moe/test_row_sums.py"]),
    ("row_sums.py", "arange(num_sums + 1,", "arange(num_sums,", ["tests/moe/test_row_sums.py"]),
    ("layer.py", " + shared()", "", DSV3),
    ("layer.py", "ids_TK.masked_fill(~routing.kept.flatten(0, 1), self.num_experts)", "ids_TK", PROPERTIES),
    ("dispatch/base.py", "flatten().argsort(stable=True)", "flatten().argsort(descending=True)", DISPATCH),
    ("dispatch/alltoall.py", "order_M // topk_ids_TK.shape[1]", "order_M % x_TH.shape[0]", DISPATCH),
    (
        "dispatch/alltoall.py",
        "self.ep.all_to_all(out_RH, sent, received)",
        "self.ep.all_to_all(out_RH, received, sent)",
        DISPATCH,
    ),
    ("dispatch/rows.py", "out_RH.index_select(0, back_R)", "out_RH.index_select(0, by_expert_R)", DISPATCH),
    ("dispatch/rows.py", "+ line_words - 1) // line_words", ") // line_words", DISPATCH),
    ("dispatch/rows.py", "grad_RC.dtype)[word_RC] = grad_RC", "grad_RC.dtype)[word_RC] = 0", DISPATCH),
    ("dispatch/rows.py", "ctx.dtype)[word_RC] = grad_RC", "ctx.dtype)[word_RC] = 0", DISPATCH),
    ("dispatch/rows.py", "// self.line_words * width", "// self.line_words * self.line_words", DISPATCH),
    ("dispatch/wire.py", "scales_BS[:, whole:]", "scales_BS[:, :1]", DISPATCH),
    ("dispatch/wire.py", "    discard(x_BH, decode_rows, lines_BW, x_BH.shape[1], x_BH.dtype)", "    pass", DISPATCH),
    ("dispatch/hierarchical.py", "part_TK.masked_fill(again_TK, num_parts)", "part_TK", DISPATCH),
    ("dispatch/hierarchical.py", "- group.rank * num_local", "- 0 * num_local", DISPATCH),
    ("dispatch/allgather.py", "ep.rank * self.num_local", "0 * self.num_local", DISPATCH),
    (
        "dispatch/etp.py",
        "(num_ranks, num_rows)).sum(0)",
        "(num_ranks, num_rows)).mean(0)",
        [f"{MESH}[mixtral-dp_shard2-etp2-mb2-alltoall]"],
    ),
    (
        "automoe/comm/process_groups.py",
        "comm.rank * total // comm.num_ranks",
        "(comm.num_ranks - 1 - comm.rank) * total // comm.num_ranks",
        [f"{MESH}[llama-tp2-mb4-alltoall]"],
    ),
]
_MODEL = [
    ("attention.py", "out_BSND * gate.sigmoid()", "out_BSND * gate", NEXT),
    ("attention_kernels.py", "% 128 != 64", "% 128 != 0", ["tests/model/test_attention_kernels.py"]),
    ("attention_kernels.py", "k_BRGD[:, 0, :, dim] = 1", "k_BRGD[:, 0, :, dim] = 2", GPT_OSS),
    ("attention_kernels.py", "F.pad(mask, (1, 0), value=True)", "F.pad(mask, (1, 0), value=False)", GPT_OSS),
    ("attention_masks.py", "tokens.index - window + 1", "tokens.index - window", BLOCKS),
    ("attention_masks.py", "first_BqQ.amin(2, True) <= ends_k", "first_BqQ.amax(2, True) <= ends_k", BLOCKS),
    ("attention_kernels.py", "aux.lse - sinks_N[:, None]", "aux.lse + sinks_N[:, None]", BLOCKS),
    ("attention.py", "LATENT_NORM_EPS = 1e-6", "LATENT_NORM_EPS = 1e-4", parity("dsv3_odd")),
    ("attention.py", "return self.blocks[window]", "return self.blocks[0]", GPT_OSS),
    ("rows.py", "chunks[::2] + chunks[::-2]", "chunks[::2] + chunks[1::2]", MASKS),
    (
        "attention_masks.py",
        "docs_BS is None and keys.num_ranks == 1 and not",
        "docs_BS is None and not",
        [f"{MESH}[deepseek-cp2-mb4-alltoall-nomask]"],
    ),
    (
        "attention.py",
        "first_of_rank(ranks, num_heads) * head_dim",
        "ranks.rank % num_heads * head_dim",
        [f"{MESH}[qwen3-tp4-ep4-mb4-allgather]"],
    ),
    (
        "attention_masks.py",
        "key_index_BR[:, None, :] <= tokens.index[:, :, None]",
        "key_index_BR[:, None, :] < tokens.index[:, :, None]",
        MASKS + LLAMA,
    ),
    ("rope.py", "config.theta**exponents", "config.theta ** (exponents / 2)", LLAMA),
    ("rope.py", "addcmul_(b, sin, value=-1)", "addcmul_(b, sin)", LLAMA),
    ("rope.py", "_pairs(turned, from_pairs)", "_pairs(turned, not from_pairs)", DSV3 + LLAMA),
    (
        "rope.py",
        "yarn_mscale(config.factor, config.mscale_all_dim) ** 2",
        "yarn_mscale(config.factor, config.mscale_all_dim)",
        parity("dsv3_odd"),
    ),
    ("rope.py", "(turns - low) / (high - low)", "(turns - high) / (low - high)", LLAMA),
    ("rope.py", "math.floor(low)", "math.ceil(low)", ROPE + parity("qwen3_moe_yarn")),
    ("rope.py", "qk_head_dim**-0.5", "(qk_head_dim + 1) ** -0.5", LLAMA),
    ("norm.py", "mean_square.add_(eps)", "mean_square", NORMS),
    ("norm.py", "unsqueeze(1) * scale.pow(3)", "unsqueeze(1) * scale.pow(2)", NORMS),
    ("norm.py", "weight = weight + 1", "weight = weight", NEXT),
    ("norm.py", '"zeros" if zero_centered else "ones"', '"ones"', INIT),
    ("block.py", "sigmoid() * out_BsH", "sigmoid()", NEXT),
    ("loss.py", "(labels_T != IGNORE).unsqueeze(1)", "(labels_T >= IGNORE).unsqueeze(1)", LOSS),
    ("loss.py", "divisor_T1.log() + largest_T1", "divisor_T1.log()", LOSS),
    ("loss.py", "sum_T1 *= (mine_T1 - largest_T1).exp_()", "pass", LOSS),
    ("automoe/kernels/cross_entropy.py", "gradient - 1.0, gradient", "gradient, gradient", LOSS),
    ("automoe/kernels/cross_entropy.py", "total * tl.exp(largest - base)", "total", ["tests/gpu/test_device_loss.py"]),
    ("automoe/kernels/squares.py", "mask=at < count", "mask=at < count - 1", ["tests/gpu/test_device_loss.py"]),
    ("automoe/kernels/norm.py", "number * number, axis=1) / dim", "number * number, axis=1) / BLOCK_D", NORM_KERNELS),
    ("automoe/kernels/norm.py", "given - normed * shrink", "given - number * shrink", NORM_KERNELS),
    ("automoe/kernels/norm.py", "share += given * normed", "share = given * normed", NORM_KERNELS),
    ("automoe/launch/hardware.py", ">= HALVES_SINCE_TORCH", "> HALVES_SINCE_TORCH", ["tests/launch/test_hardware.py"]),
    ("loss.py", "else grad * grad_total", "else grad + 0 * grad_total", LLAMA),
    ("linear.py", "out_BSO + local_shard(self.bias)", "out_BSO", GPT_OSS),
    ("causal_lm.py", "counts.trained.clamp_min(1)", "counts.non_padding.clamp_min(1)", LLAMA),
    ("block.py", "x_BsH = x_BsH + self.attention", "x_BsH = self.attention", LLAMA),
    ("delta_net.py", "q_BSGK.shape[-1] ** -0.5", "1.0", NEXT),
    ("delta_net.py", "(0, 0, width - 1, 0)", "(0, 0, 0, width - 1)", NEXT),
    ("delta_net.py", "b_BSN.sigmoid()", "b_BSN.sigmoid() * 2", NEXT),
    ("init.py", "normal_at(index, name, seed) * std", "normal_at(index, name, 0) * std", INIT),
    ("init.py", '"bias", "gate_up_proj_bias", "down_proj_bias")', '"bias", "gate_up_proj_bias")', INIT),
    ("param_spec.py", 'self.kind in ("matrix", "conv")', 'self.kind in ("matrix", "conv", "norm")', DECAY),
    ("params.py", "return _vector(name, shape, place, when=", "return ParamSpec(name, shape, place, when=", DECAY),
    (
        "params.py",
        '_rowwise("o_proj", "H N*D", 5)',
        '_colwise("o_proj", "H N*D", 5)',
        ["tests/model/test_params_table.py::test_rows_agree_with_the_modules_that_own_the_parameters"],
    ),
]
_PARALLEL = [
    ("fsdp.py", '"bfloat16": torch.float32}', '"bfloat16": torch.bfloat16}', DTYPES),
    ("fsdp.py", "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)", DTYPES),
    ("fsdp.py", 'last or parallel.grad_sync == "micro_batch"', "last", ["tests/parallel/test_communication.py"]),
    (
        "fsdp.py",
        "reduce_dtype=reduce, cast_forward_inputs=False\n    )\n    wide",
        "reduce_dtype=compute, cast_forward_inputs=False\n    )\n    wide",
        DTYPES,
    ),
    ("fsdp.py", "not None and compute != reduce", "not None and compute == reduce", DTYPES),
    (
        "context.py",
        "(2 * cp - 1 - rank) * chunk",
        "(2 * cp - 2 - rank) * chunk",
        [f"{MESH}[deepseek-cp2-mb4-alltoall-nomask]"],
    ),
    (
        "automoe/moe/experts.py",
        "self.down_proj_bias)[1]",
        "self.down_proj_bias)[0]",
        [f"{MESH}[gpt-oss-cp2-etp2-mb4-alltoall]"],
    ),
    ("shared_gradients.py", "dist.all_reduce(flat, group=group)", "pass", [f"{MESH}[llama-tp2-mb4-alltoall]"]),
    ("pipeline.py", "scale_grads=False", "scale_grads=True", DTYPES),
    (
        "mesh.py",
        'self.coordinate("dp_replicate") * self.shape.dp_shard',
        'self.coordinate("dp_replicate")',
        [f"{MESH}[qwen3-dp_replicate2-dp_shard2-ep4-mb1-hierarchical-nodesof2]"],
    ),
    ("automoe/comm/collectives.py", "dim=1)[self.rank]", "dim=1)[0]", [f"{MESH}[qwen3-tp4-ep4-mb4-allgather]"]),
    ("pipeline.py", "(torch.float64) * self.reports_loss", "(torch.float64)", [f"{MESH}[llama-tp2-mb4-alltoall]"]),
]
_MERGED = [
    ("overlap.py", "        self.swap()\n", "", OVERLAP),
    ("overlap.py", "        self.work_off()\n", "", ["tests/mesh/test_mesh_float64.py"]),
    ("overlap.py", "self._waiting.popleft()()", "self._waiting.pop()()", OVERLAP),
    ("overlap.py", "ctx.splits = output_splits, input_splits", "ctx.splits = input_splits, output_splits", OVERLAP),
    ("overlap.py", "        if self._errors:\n            raise _OtherPassFailed\n", "", OVERLAP),
    ("pipeline.py", "num_micro_batches, merged)\n", "num_micro_batches, False)\n", OVERLAP),
    ("pipeline.py", "if side == rank)", "if side != rank)", ["tests/mesh/test_mesh_float64.py"]),
]
_CHECKPOINT = [
    ("hashed_files.py", "os.fsync(self._file.fileno())", "pass", COMMIT),
    ("automoe/storage/files.py", "os.fsync(file.fileno())", "pass", COMMIT),
    ("automoe/storage/files.py", "os.fsync(descriptor)", "pass", COMMIT),
    ("store.py", "            flush(target)\n", "            pass\n", COMMIT),
    ("automoe/storage/folder.py", "    flush(path.parent)\n", "    pass\n", COMMIT),
    ("automoe/storage/files.py", "flushed=True)\n    flush(path.parent)", "flushed=True)\n    pass", COMMIT),
    ("automoe/checkpoint/folder.py", "max(checkpoint.keep, 1)", "max(checkpoint.keep + 1, 1)", RETENTION),
    ("automoe/checkpoint/folder.py", "-step_number(name))", "step_number(name))", RETENTION),
    ("automoe/checkpoint/folder.py", "% checkpoint.keep_every == 0", "% checkpoint.keep_every == 1", RETENTION),
    ("automoe/checkpoint/folder.py", 'step_dir.with_name(f".tmp-deleted-{step_dir.name}")', "step_dir", COMMIT),
    ("manifest.py", 'size != facts["bytes"]', 'size < facts["bytes"]', COMMIT),
    ("manifest.py", "content and not is_as_written(path, facts)", "False", COMMIT),
    ("manifest.py", 'manifest["sha256"] != digest_of', "not digest_of", COMMIT),
    ("newest.py", "reversed(steps)", "steps", DAMAGE),
    ("store.py", "math.isfinite(val_loss)", "True", RETENTION),
    ("store.py", "self.ranks.all(state.not_finite)", "[[]]", ["tests/checkpoint/test_disk_faults.py"]),
    ("automoe/checkpoint/folder.py", 'if manifest["counters"]["skipped"]:', "if False:", RETENTION),
    ("automoe/checkpoint/folder.py", "path.is_dir() and not path.is_symlink()", "path.is_dir()", RETENTION),
    (
        "automoe/comm/agreement.py",
        "load.index(min(load))",
        "load.index(max(load))",
        ["tests/checkpoint/test_disk_faults.py::test_files_to_verify_are_spread_over_ranks"],
    ),
    (
        "automoe/comm/agreement.py",
        "key=lambda error: isinstance(error, OSError)",
        "key=lambda error: 0",
        ["tests/checkpoint/test_disk_faults.py::test_ranks_agree_on_what_went_wrong"],
    ),
    (
        "generators.py",
        "state[-1:].view(torch.float64).item() if has_gauss else None",
        "None",
        ["tests/checkpoint/test_resume.py::test_random_generators_go_on_where_they_were"],
    ),
]
_HF = [
    ("keys.py", "offset=(0, i * shape[2], 0)", "offset=(0, (1 - i) * shape[2], 0)", FUSED),
    ("folder.py", "{escape(float32_copy(folder))}*", "{float32_copy(folder)}*", ["tests/hf/test_hf_commit.py"]),
    ("keys.py", "return self.per_expert if keys else self", "return self", LEAVE),
    ("keys.py", "enumerate(keys)", "enumerate(keys[::-1])", QWEN),
    ("families/gpt_oss.py", "[E H I*2]", "[E H 2*I]", GPT_OSS),
    ("families/gpt_oss.py", "[E I H]", "[E H I]", GPT_OSS),
    (
        "families/gpt_oss.py",
        '"router.softmax_after_topk": True',
        '"router.softmax_after_topk": False',
        GPT_OSS,
        "a softmax over all, divided by the sum of those chosen, is the softmax over those chosen",
    ),
    ("families/as_transformers.py", "config.standardize_rope_params()", "pass", READ),
    ("families/qwen.py", " or (layer + 1) % step", "", READ),
    ("families/deepseek_v3.py", "if angles != dims:", "if False:", READ),
    ("families/family.py", 'params.get("truncate", True)', 'params.get("truncate") is not False', READ),
    ("families/family.py", "if given is None and all(both):", "if False:", READ),
    ("families/family.py", "max_positions / original if factor is None", "1.0 if factor is None", READ),
    ("families/family.py", "params.get(key) or default", 'params.get("beta_slow") or default', REGISTRY),
    ("families/family.py", "(layer + 1) % interval", "layer % interval", NEXT),
    ("quantized.py", " / LARGEST[E4M3]", "", QUANTIZED),
    ("quantized.py", "start[0] // block[0]]", "start[0] % block[0]]", QUANTIZED),
    ("quantized.py", "(byte & 0x08) * 0x1000", "(byte & 0x08) * 0x800", QUANTIZED),
    ("quantized.py", "numbers.mul_(2.0**14)", "numbers.mul_(2.0**13)", QUANTIZED),
]
_QUANTIZE = [
    ("formats.py", "E4M3: 448.0", "E4M3: 240.0", FORMATS),
    ("formats.py", "(mantissa == 0.5)", "(mantissa != 0.5)", FORMATS),
    ("scaling.py", "if remember:", "if True:", FP8),
    ("scaling.py", "self.history[:, :-1]", "self.history[:, 1:]", FP8),
    ("scaling.py", "local.nan_to_num(nan=torch.inf", "local.nan_to_num(nan=0.0", FP8),
    ("scaling.py", "GRAD: gradients}", "GRAD: E4M3}", FP8),
]
_FOLDERS = {
    "automoe/optim": _OPTIM,
    "automoe/training": _TRAINING + _RUN,
    "recipes": _RECIPES,
    "automoe/moe": _MOE,
    "automoe/model": _MODEL,
    "automoe/parallel": _PARALLEL + _MERGED,
    "automoe/checkpoint": _CHECKPOINT,
    "automoe/hf": _HF,
    "automoe/quantize": _QUANTIZE,
}
MUTANTS = (
    [
        Mutant(file if file.startswith("automoe/") else f"{folder}/{file}", *rest)
        for folder, rows in _FOLDERS.items()
        for file, *rest in rows
    ]
    + CONFIG
    + DATA
    + EXPORTS
    + FINE_TUNING
    + PLANNER
)
