"""Configurations whose step is measured against the plan; ranks import this too.

Narrow models with rows long enough that activations, gradients and temporaries outweigh what stands still. Experts get
their even share of tokens (``moe.gate=balanced``), as the plan counts them.
"""

from __future__ import annotations

from automoe.config.schema import Config
from tests.support.configurations import quick_config

COMMON = ["moe.gate=balanced", "train.seq_len=512", "model.hidden_size=256", "train.micro_batch_size=2"]
COMMON += ["cluster=laptop", "train.global_batch_size=8", "launch.num_ranks=null", "model.vocab_size=1024"]
COMMON += [f"mesh.{axis}=1" for axis in ("pp", "ep", "dp_shard")]

GLM, MTP = "model=small_glm4_moe", "model.num_mtp_layers=1"
QWEN, DSV3, GPT_OSS, MIXTRAL, LLAMA = (f"model=small_{n}" for n in ("qwen3_moe", "dsv3", "gpt_oss", "mixtral", "llama"))
DSV4, LONGCAT, MUSE = "model=small_dsv4", "model=small_longcat", ["model=small_muse", "checkpoint.export_hf=false"]
ONE, TWO, FOUR = "mesh.dp_shard=1", "mesh.dp_shard=2", "mesh.dp_shard=4"
BF16, NARROW = "train.dtype=bfloat16", "optim.master_weights=stochastic"
MUON = "optim.algorithm=muon"
PP2, PP4 = "mesh.pp=2", "mesh.pp=4"
TWICE = ["parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2"]
EXCHANGED = ["mesh.dp_shard=1", "mesh.cp=2", "parallel.context=ulysses"]
TINY = ["model.hidden_size=64", "model.intermediate_size=64", "model.num_layers=2", "model.vocab_size=264"]
FREED = ["parallel.reshard=micro_batch", "parallel.grad_sync=micro_batch"]


def again(*names: str) -> str:
    return f"parallel.recompute=[{','.join(names)}]"


CASES: dict[str, list[str]] = {
    "qwen": [QWEN, ONE],
    "qwen one micro-batch": [QWEN, ONE, "train.global_batch_size=2"],
    "qwen bfloat16": [QWEN, ONE, BF16],
    "qwen stochastic": [QWEN, ONE, BF16, NARROW, "optim.moments=bfloat16"],
    "qwen bfloat16 moments": [QWEN, ONE, BF16, "optim.moments=bfloat16"],
    "qwen stochastic, one micro-batch": [QWEN, ONE, BF16, NARROW, "train.global_batch_size=2"],
    "qwen one document": [QWEN, ONE, "data.document_mask=false"],
    "qwen full": [QWEN, ONE, again("full"), "model.num_layers=6"],
    "qwen full bfloat16, long rows": [QWEN, ONE, BF16, again("full"), "train.seq_len=1024", "train.micro_batch_size=1"],
    "qwen moe": [QWEN, ONE, again("moe")],
    "qwen core_attn layernorm": [QWEN, ONE, BF16, again("core_attn", "layernorm")],
    "qwen loop": [QWEN, ONE, "moe.experts=loop"],
    "qwen ep2": [QWEN, TWO, "mesh.ep=2"],
    "qwen ep2 allgather": [QWEN, TWO, "mesh.ep=2", "moe.dispatcher=allgather"],
    "qwen ep_shard2 freed": [QWEN, TWO, *FREED, "model.num_layers=6"],
    "qwen ep2 8 bits": [QWEN, TWO, "mesh.ep=2", BF16, "moe.dispatch_dtype=fp8"],
    "dsv3 8 bits layernorm": [DSV3, ONE, BF16, again("layernorm"), "moe.dispatch_dtype=fp8"],
    "qwen ep2 8 bits moe": [QWEN, TWO, "mesh.ep=2", BF16, again("moe"), "moe.dispatch_dtype=fp8"],
    "qwen ep2 merged": [QWEN, TWO, "mesh.ep=2", "parallel.overlap_all_to_all=true"],
    "dsv3 pp2 ep2 merged": [DSV3, TWO, PP2, *TWICE, "mesh.ep=2", BF16, "parallel.overlap_all_to_all=true", "train.global_batch_size=32"],
    "qwen ep2 fused": [QWEN, TWO, "mesh.ep=2", "parallel.expert_wgrad=fused"],
    "dsv3 pp2 ep2 delayed": [DSV3, TWO, PP2, *TWICE, "mesh.ep=2", BF16, "parallel.overlap_all_to_all=true", "parallel.expert_wgrad=delayed", "train.global_batch_size=32"],
    "qwen ep2 delayed, wide experts": [QWEN, TWO, "mesh.ep=2", "parallel.overlap_all_to_all=true", "parallel.expert_wgrad=delayed", "model.moe_intermediate_size=256"],
    "qwen ep2 fused, few rows": [QWEN, TWO, "mesh.ep=2", BF16, "parallel.expert_wgrad=fused", "train.micro_batch_size=1", "train.seq_len=128", "model.moe_intermediate_size=256"],
    "qwen etp2": [QWEN, TWO, "mesh.etp=2", BF16],
    "qwen capacity": [QWEN, TWO, "mesh.ep=2", "moe.capacity_factor=1.5", "moe.pad_to_capacity=true"],
    "qwen cp2": [QWEN, "mesh.dp_shard=1", "mesh.cp=2", "mesh.ep=2"],
    "qwen cp2 ulysses": [QWEN, *EXCHANGED, "mesh.ep=2", "data.document_mask=false"],
    "qwen cp2 ulysses core_attn": [QWEN, *EXCHANGED, "mesh.ep=2", BF16, again("core_attn", "layernorm")],
    "gpt_oss cp2 ulysses": [GPT_OSS, *EXCHANGED, "mesh.ep=2", BF16],
    "dsv3 cp2 ulysses": [DSV3, *EXCHANGED, "mesh.ep=2", BF16],
    "dsv3 cp2 ulysses mla_up_proj": [DSV3, *EXCHANGED, "mesh.ep=2", again("mla_up_proj")],
    "next cp2": ["model=small_qwen3_next", "mesh.dp_shard=1", "mesh.cp=2", "mesh.ep=2"],
    "qwen tp2": [QWEN, "mesh.dp_shard=1", "mesh.tp=2", "mesh.ep=2"],
    "qwen pp2, 8": [QWEN, ONE, PP2, "train.global_batch_size=16"],
    "qwen pp2, 64": [QWEN, ONE, PP2, "train.global_batch_size=64", "train.micro_batch_size=1", "train.seq_len=128"],
    "qwen pp2 interleaved": [QWEN, ONE, PP2, *TWICE, "train.global_batch_size=16"],
    "qwen pp2 ends alone": [QWEN, ONE, PP2, "parallel.schedule=Interleaved1F1B", "parallel.layout='E|ttt|t|L'", "train.global_batch_size=16"],
    "qwen pp2 bfloat16 full": [QWEN, ONE, PP2, BF16, again("full"), "train.global_batch_size=16"],
    "qwen muon, one micro-batch": [QWEN, ONE, MUON, "train.global_batch_size=2", "train.seq_len=128"],
    "dsv3 muon ep2": [DSV3, TWO, MUON, "mesh.ep=2", "train.global_batch_size=4", "train.seq_len=128"],
    "dsv3": [DSV3, ONE],
    "dsv3 bfloat16": [DSV3, ONE, BF16],
    "dsv3 mla_up_proj": [DSV3, ONE, BF16, again("mla_up_proj")],
    "dsv3 as tuned": [DSV3, TWO, "mesh.ep=2", BF16, again("layernorm", "mla_up_proj", "mlp", "moe")],
    "dsv3 pp2 ep2": [DSV3, TWO, PP2, "mesh.ep=2", BF16, "train.global_batch_size=32"],
    "dsv3 pp4 few": [DSV3, ONE, PP4, BF16, "train.global_batch_size=8"],
    "dsv3 pp2 interleaved as tuned": [
        DSV3, ONE, PP2, *TWICE, BF16, again("layernorm", "mla_up_proj", "mlp", "moe"), "train.global_batch_size=16",
    ],
    "dsv3 mtp": [DSV3, ONE, MTP, "model.num_layers=2"],
    "dsv3 mtp, one micro-batch": [DSV3, TWO, "mesh.ep=2", MTP, BF16, "model.num_layers=2", "train.global_batch_size=4"],
    "dsv3 two mtp full, wide vocabulary": [
        DSV3, ONE, again("full"), "model.num_mtp_layers=2", "model.num_layers=2", "model.vocab_size=8192",
    ],
    "dsv3 mtp pp2 tp2": [DSV3, "mesh.dp_shard=1", PP2, "mesh.tp=2", "mesh.ep=2", MTP, BF16, "train.global_batch_size=16"],
    "dsv3 mtp apart, pp2": [
        DSV3, ONE, PP2, BF16, MTP, "parallel.schedule=Interleaved1F1B", "parallel.layout='Ett|tt|m|L'", "train.global_batch_size=16",
    ],
    "dsv3 two mtp apart, pp4, wide vocabulary": [
        DSV3, ONE, PP4, "model.num_mtp_layers=2", "parallel.layout='Et*3|tm|m|L'", "train.global_batch_size=16", "model.vocab_size=4096",
    ],
    "dsv32": ["model=small_dsv32", ONE],
    "dsv32 full, one document": ["model=small_dsv32", ONE, again("full"), "data.document_mask=false"],
    "dsv32 core_attn, long rows": [
        "model=small_dsv32", ONE, again("core_attn"), "train.seq_len=1024", "train.micro_batch_size=1",
        "train.global_batch_size=2",
    ],
    "dsv32 eight rows": [
        "model=small_dsv32", ONE, again("core_attn"), *TINY, "train.micro_batch_size=8", "model.attention.num_heads=16",
    ],
    "dsv32 tp2": ["model=small_dsv32", "mesh.dp_shard=1", "mesh.tp=2", "mesh.ep=2"],
    "glm_moe_dsa": ["model=small_glm_moe_dsa", ONE],
    "glm mtp as tuned": [GLM, TWO, "mesh.ep=2", MTP, BF16, again("layernorm", "mlp", "moe")],
    "gpt_oss": [GPT_OSS, ONE],
    "gpt_oss moe bfloat16": [GPT_OSS, ONE, BF16, again("layernorm", "moe")],
    "gpt_oss ep2": [GPT_OSS, TWO, "mesh.ep=2", BF16],
    "granite": ["model=small_granite", ONE],
    "granite tp2 full bfloat16": ["model=small_granite", "mesh.dp_shard=1", "mesh.tp=2", "mesh.ep=2", BF16, again("full")],
    "dsv2": ["model=small_dsv2", ONE],
    "ernie": ["model=small_ernie45", ONE],
    "ernie tp2 full bfloat16": ["model=small_ernie45", "mesh.dp_shard=1", "mesh.tp=2", "mesh.ep=2", BF16, again("full")],
    "dsv4": [DSV4, ONE],
    "dsv4 bfloat16": [DSV4, ONE, BF16],
    "dsv4 one stream more, windows alone": [DSV4, ONE, BF16, "model.hc_mult=5", "model.attention.compress_ratios=[0,0,0,0]"],
    "dsv4 full bfloat16, long rows": [DSV4, ONE, BF16, again("full"), "train.seq_len=1024", "train.micro_batch_size=1"],
    "dsv4 layernorm moe shared_experts": [DSV4, TWO, "mesh.ep=2", BF16, again("layernorm", "moe", "shared_experts")],
    "dsv4 tp2": [DSV4, "mesh.dp_shard=1", "mesh.tp=2", "mesh.ep=2"],
    "dsv4 pp2 interleaved": [DSV4, ONE, PP2, *TWICE, BF16, "train.global_batch_size=16"],
    "muse": [*MUSE, ONE],
    "muse bfloat16, wide latent": [*MUSE, ONE, BF16, "model.moe_latent_size=192"],
    "muse ep2 moe": [*MUSE, TWO, "mesh.ep=2", BF16, again("layernorm", "moe")],
    "muse tp2 full": [*MUSE, "mesh.dp_shard=1", "mesh.tp=2", "mesh.ep=2", BF16, again("full")],
    "muse pp2 interleaved": [*MUSE, ONE, PP2, *TWICE, BF16, "train.global_batch_size=16"],
    "longcat": [LONGCAT, ONE],
    "longcat bfloat16, many identities": [LONGCAT, ONE, BF16, "model.router.num_zero_experts=16"],
    "longcat full bfloat16, long rows": [LONGCAT, ONE, BF16, again("full"), "train.seq_len=1024", "train.micro_batch_size=1"],
    "longcat ep2 layernorm moe shared_experts": [LONGCAT, TWO, "mesh.ep=2", BF16, again("layernorm", "moe", "shared_experts")],
    "longcat tp2": [LONGCAT, "mesh.dp_shard=1", "mesh.tp=2", "mesh.ep=2"],
    "longcat pp2": [LONGCAT, ONE, PP2, BF16, "train.global_batch_size=16"],
    "mixtral replicas": [MIXTRAL, "mesh.dp_shard=1", "mesh.dp_replicate=2", BF16],
    "llama": [LLAMA, ONE],
    "llama full bfloat16": [LLAMA, ONE, BF16, again("full"), "model.num_layers=6", "model.first_k_dense=6"],
    "llama dp2 freed": [LLAMA, TWO, *FREED, BF16, "model.num_layers=6", "model.first_k_dense=6"],
    "qwen math": [QWEN, ONE, "kernels.attention=math"],
    "qwen math bfloat16": [QWEN, ONE, BF16, "kernels.attention=math", again("moe")],
    "gpt_oss math": [GPT_OSS, ONE, "kernels.attention=math"],
    "dsv3 math": [DSV3, ONE, BF16, "kernels.attention=math", "train.micro_batch_size=1"],
    "qwen averages": [QWEN, ONE, BF16, "optim.ema_decay=0.99"],
    "llama wide batch": [LLAMA, ONE, "train.micro_batch_size=8", "train.global_batch_size=16"],
    "llama core_attn": [LLAMA, ONE, BF16, again("core_attn"), "model.intermediate_size=64", "train.micro_batch_size=8",
                        "train.global_batch_size=16"],
    "llama many rows": [LLAMA, ONE, again("full"), *TINY, "model.first_k_dense=2", "train.global_batch_size=256", "train.micro_batch_size=16"],
    "llama pp2 interleaved full": [
        LLAMA, ONE, PP2, *TWICE, BF16, again("full"), "train.global_batch_size=16", "train.micro_batch_size=4",
    ],
    "llama pp2, 64": [LLAMA, ONE, PP2, *TINY, "model.first_k_dense=2", "train.global_batch_size=64", "train.micro_batch_size=1"],
    "llama wide vocabulary": [LLAMA, ONE, BF16, "model.vocab_size=8192", "model.num_layers=2", "model.first_k_dense=2"],
    "qwen many experts": [
        QWEN, ONE, "model.hidden_size=64", "model.attention.num_heads=2", "model.num_experts=512",
        "model.num_experts_per_token=2", "model.moe_intermediate_size=8", "train.micro_batch_size=4",
    ],
    "qwen pp2, short rows": [QWEN, ONE, PP2, "train.seq_len=64", "train.micro_batch_size=1"],
    "llama GPipe": [
        LLAMA, ONE, PP2, "parallel.schedule=GPipe", "model.vocab_size=4096", "model.num_layers=2",
        "model.first_k_dense=2", "train.seq_len=64", "train.micro_batch_size=1",
    ],
    "dsv3 wide shared experts": [DSV3, ONE, "model.num_shared_experts=8", "model.first_k_dense=0"],
    "llama pp2, 4 stages each": [
        LLAMA, ONE, PP2, "parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=4", again("full"), *TINY,
        "model.num_layers=8", "model.first_k_dense=8", "train.micro_batch_size=8", "train.global_batch_size=64",
    ],
    "llama many heads": [
        LLAMA, ONE, again("full"), *TINY, "model.first_k_dense=2", "model.attention.num_heads=16",
        "model.attention.num_kv_heads=16", "data.document_mask=false", "train.micro_batch_size=8",
        "train.global_batch_size=16",
    ],
    "llama many heads, kept": [
        LLAMA, ONE, *TINY, "model.first_k_dense=2", "model.attention.num_heads=16",
        "model.attention.num_kv_heads=16", "data.document_mask=false", "train.micro_batch_size=8",
        "train.global_batch_size=16",
    ],
}  # fmt: skip


def case(name: str) -> Config:
    """The configuration called ``name``."""
    last = {text.split("=")[0]: text for text in (*COMMON, *CASES[name])}
    return quick_config(overrides=list(last.values()))
