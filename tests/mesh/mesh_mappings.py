"""The mappings of the mesh suite: a core for every change, and all the others."""

from __future__ import annotations

from mesh_cases import Case

INTERLEAVED = dict(schedule="Interleaved1F1B", stages_per_rank=2)
GPIPE = dict(schedule="GPipe")
# Backward passes in halves; stages down the ranks and up again; all forwards first.
HALVES = dict(schedule="InterleavedZeroBubble", stages_per_rank=2)
ZBV = dict(schedule="ZBVZeroBubble", stages_per_rank=2)
DUAL_PIPE = dict(schedule="DualPipeV", stages_per_rank=2)
BREADTH_FIRST = dict(schedule="LoopedBFS", stages_per_rank=2)
PER_MICRO_BATCH = dict(reshard="micro_batch", grad_sync="micro_batch")
FULL = dict(recompute="full")
PARTS = dict(recompute=["core_attn", "moe"])
ULYSSES = dict(context="ulysses")
RING = dict(context="ring")
DROP = dict(capacity_factor=1.0, drop_scope="sequence")
PADDED = DROP | dict(drop_policy="position", pad_to_capacity=True)

NODES = dict(dispatcher="hierarchical", gpus_per_node=2)

LORA = dict(rank=4, dropout=0.25)
MUON = dict(algorithm="muon")
CLIP = dict(qk_clip=0.5)
MUON_CLIP = MUON | CLIP  # most heads of these models have larger logits
EVALUATED = dict(val_every=1)  # and prompts answered, after every step
WARMUP = dict(indexer="warmup", freeze=["*"], trainable=["*.indexer.*"])
MERGED = dict(overlap_all_to_all=True)
FUSED = dict(expert_wgrad="fused")
DELAYED = MERGED | dict(expert_wgrad="delayed")

CORE = [
    # one rank: accumulation
    Case("deepseek", rows=2),
    Case("mixtral", rows=2, parallel=PER_MICRO_BATCH),
    # two ranks: each axis alone, or with the one that folds over it
    Case("deepseek", dict(pp=2), rows=2),
    Case("deepseek", dict(pp=2), rows=2, parallel=dict(schedule="1F1B", layers_per_stage=[5, 0])),
    Case("deepseek", dict(dp_shard=2), rows=4),
    Case("qwen3", dict(dp_shard=2, ep=2), rows=1),
    Case("mixtral", dict(dp_shard=2, ep=2), rows=2, dispatcher="allgather", parallel=PER_MICRO_BATCH),
    Case("deepseek", dict(cp=2), rows=4, document_mask=False),
    Case("deepseek", dict(tp=2), rows=4),
    Case("qwen3", dict(tp=2, ep=2), rows=2, parallel=PARTS),
    Case("mixtral", dict(dp_shard=2, etp=2), rows=2),
    Case("mixtral", dict(tp=2, etp=2), rows=2, moe=DROP),
    Case("llama", dict(tp=2), rows=4),
    # four ranks
    Case("qwen2", dict(tp=4, ep=4), rows=4, parallel=FULL, **NODES),
    Case("qwen3", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, **NODES),
    Case("qwen3", dict(tp=4, ep=4), rows=4, dispatcher="allgather"),
    Case("deepseek", dict(dp_shard=2, tp=2, etp=2), rows=2),
    Case("qwen3", dict(dp_replicate=2, tp=2, ep=2, ep_replicate=2), rows=2),
    Case("qwen3-tied", dict(pp=2, tp=2, etp=2), rows=2, parallel=INTERLEAVED),
    # eight ranks
    Case("deepseek", dict(pp=2, dp_shard=2, cp=2, ep=4), rows=1, parallel=INTERLEAVED, **NODES),
    Case("deepseek", dict(pp=2, dp_shard=2, tp=2, ep=2, etp=2), rows=1, parallel=INTERLEAVED),
    # each all-to-all behind the other micro-batch
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | DELAYED),
    # embedding and head on one rank
    Case("qwen3-tied", dict(pp=2), rows=2, parallel=ZBV),
    # sinks, windows and biases
    Case("gpt-oss", dict(cp=2, etp=2), rows=4),
    Case("gpt-oss", dict(dp_shard=2, tp=2, etp=2), rows=2, document_mask=False),
    # delta nets
    Case("qwen3-next", dict(pp=2, dp_shard=2, ep=2), rows=2),
    Case("qwen3-next", dict(tp=2, ep=2), rows=4, parallel=PARTS),
    # heads exchanged for positions: sinks and windows; delta nets
    Case("gpt-oss", dict(cp=2, tp=2, ep=2), rows=4, parallel=ULYSSES),
    Case("qwen3.5", dict(cp=4, ep=2), rows=4),
    # adapters of every kind on a frozen model
    Case("deepseek", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, lora=LORA),
    # modules for multi-token prediction, whose embedding a pipeline holds twice
    Case("deepseek-mtp", dict(pp=2), rows=2, parallel=dict(schedule="1F1B", layers_per_stage=[4, 1])),
    Case("deepseek-mtp", dict(cp=2, ep=2), rows=4),
    # away from the head, on two stages of two ranks
    Case(
        "deepseek-mtp2",
        dict(pp=2, dp_shard=2, ep=2),
        rows=1,
        parallel=INTERLEAVED | MERGED | dict(layout="Et|tttm|m|L"),
    ),
    # queries that see chosen keys, positions of which tp and cp ranks each score a part
    Case("deepseek-sparse", dict(cp=2, tp=2, ep=2), rows=4),
    # queries and keys normed over the heads of all tp ranks
    Case("minimax", dict(tp=2, ep=2), rows=4),
    # factors of embedding, residual, attention and logits, which are capped
    Case("granite", dict(cp=2, tp=2, ep=2), rows=4),
    Case("deepseek-mtp-scaled", dict(pp=2), rows=2, parallel=dict(schedule="1F1B", layers_per_stage=[4, 1])),
    # a softmax in groups, and one with a bias
    Case("deepseek-v2", dict(pp=2, tp=2, ep=2), rows=2),
    Case("ernie", dict(cp=2, tp=2, ep=2), rows=4),
    # streams of the residual, experts by token id, compressed keys
    Case("deepseek-v4", dict(tp=2, ep=2), rows=4),
    Case("deepseek-v4", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED),
    # gates of the residual, experts on a latent, norms of outputs
    Case("muse", dict(cp=2, tp=2, ep=2), rows=4),
    Case("muse", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED),
    # pairs of layers, experts that pass tokens on
    Case("longcat", dict(cp=2, tp=2, ep=2), rows=4),
    Case("longcat", dict(pp=2, dp_shard=2, ep=2), rows=1),
    # matrices that come whole to one owner each
    Case("deepseek", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, optim=MUON),
    # what is evaluated between steps counts nowhere; keys of their own are clipped too
    Case("mixtral", dict(pp=2), rows=2, optim=CLIP, train=EVALUATED),
    Case("mixtral-mha", dict(dp_shard=2, tp=2, ep=2), rows=2, optim=CLIP, train=EVALUATED),
]

MORE = [
    # choices of no expert that computes
    Case("longcat", rows=2),
    Case("longcat", dict(dp_shard=2, ep=2), rows=2, dispatcher="allgather", parallel=PER_MICRO_BATCH),
    Case("longcat", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, parallel=FULL, **NODES),
    Case("longcat", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, parallel=PARTS, lora=LORA),
    Case("longcat-deep", dict(pp=2, tp=2, ep=2), rows=2, parallel=ZBV, optim=CLIP),
    Case("longcat-deep", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | DELAYED),
    Case("longcat", dict(tp=2, etp=2), rows=2, optim=MUON, moe=DROP),
    Case(
        "longcat", dict(dp_shard=2, ep=2), rows=2, moe=PADDED, parallel=dict(recompute=["layernorm", "shared_experts"])
    ),
    # experts on a latent
    Case("muse", rows=2),
    Case("muse", dict(dp_shard=2, ep=2), rows=2, dispatcher="allgather", parallel=PER_MICRO_BATCH),
    Case("muse", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, parallel=FULL),
    Case("muse", dict(dp_shard=2, tp=4, ep=2), rows=2, parallel=PARTS, lora=LORA),
    Case("muse", dict(pp=2, tp=2, ep=2), rows=2, parallel=ZBV),
    Case("muse", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | DELAYED),
    Case("muse", dict(dp_shard=2, tp=2, ep=2), rows=2, optim=MUON, moe=DROP),
    # streams of the residual
    Case("deepseek-v4", rows=2),
    Case("deepseek-v4", dict(dp_shard=2), rows=4, document_mask=False, parallel=PER_MICRO_BATCH),
    Case("deepseek-v4", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, parallel=FULL),
    Case("deepseek-v4", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, parallel=PARTS, lora=LORA),
    Case("deepseek-v4", dict(pp=2, tp=2, ep=2), rows=2, parallel=ZBV),
    Case("deepseek-v4", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | DELAYED),
    Case("deepseek-v4", dict(dp_shard=2, tp=2, ep=2), rows=2, optim=MUON, moe=DROP),
    Case("deepseek-v4", dict(dp_shard=2, ep=2), rows=2, parallel=dict(recompute=["layernorm", "shared_experts"])),
    # products that add to FSDP's sums, at once or while gradients travel back
    Case("deepseek", rows=2, parallel=FUSED),
    Case("mixtral", dict(dp_shard=2, ep=2), rows=2, dispatcher="allgather", parallel=FUSED | PARTS),
    Case("gpt-oss", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, parallel=FUSED, moe=DROP),
    Case("qwen3", dict(dp_replicate=2, dp_shard=2, ep=2, ep_replicate=2), rows=1, parallel=FUSED),
    Case("qwen3-tied", dict(pp=2, cp=2, ep=2), rows=2, parallel=FUSED | INTERLEAVED | dict(recompute="full")),
    Case("deepseek", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, parallel=FUSED, optim=MUON),
    Case("glm-mtp", dict(dp_shard=2, ep=2), rows=1, parallel=DELAYED, optim=MUON),
    Case("deepseek-mtp", dict(pp=2, dp_shard=2, tp=2, ep=4), rows=1, parallel=INTERLEAVED | DELAYED, **NODES),
    Case(
        "deepseek", dict(pp=2, dp_shard=4, ep=2), rows=1, parallel=INTERLEAVED | DELAYED, moe=dict(dispatch_dtype="fp8")
    ),
    Case("qwen3", dict(dp_shard=2, cp=2, ep=2, etp=2), rows=1, parallel=DELAYED, moe=PADDED),
    Case(
        "deepseek",
        dict(dp_shard=2, ep=2),
        rows=1,
        parallel=DELAYED,
        train=dict(freeze=["*"], trainable=["*.experts.*"]),
    ),
    Case("deepseek", dict(cp=2, tp=2, ep=2), rows=4, parallel=RING),
    Case("qwen3", dict(cp=4, ep=2), rows=4, parallel=RING | PARTS),
    Case("deepseek-sparse", rows=2),
    Case("deepseek-sparse", dict(dp_shard=2), rows=4, document_mask=False),
    Case("deepseek-sparse", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, optim=MUON_CLIP),
    Case(
        "deepseek-sparse", dict(tp=2, ep=2), rows=2, parallel=dict(recompute=["layernorm", "mla_up_proj", "core_attn"])
    ),
    Case("deepseek-sparse", dict(pp=2, dp_shard=2, tp=2, ep=4), rows=1, parallel=ZBV),
    Case("deepseek-sparse", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | MERGED),
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | MERGED),
    Case("deepseek-sparse", dict(pp=2, dp_shard=2, cp=2, ep=4), rows=1, parallel=INTERLEAVED, **NODES),
    Case("deepseek-sparse", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, lora=LORA),
    Case("deepseek-sparse", dict(pp=2, cp=2, tp=2, ep=2), rows=4, train=WARMUP),
    Case("glm-sparse", dict(tp=2, ep=2), rows=4, parallel=FULL),
    Case("glm-sparse", dict(cp=2, ep=2), rows=4, document_mask=False),
    Case("glm-sparse", dict(pp=2, cp=2, ep=2), rows=2, parallel=FULL | dict(layers_per_stage=[2, 2])),
    Case("glm-sparse", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, parallel=PER_MICRO_BATCH),
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=DUAL_PIPE | MERGED),
    Case("deepseek", dict(pp=2, dp_shard=2, tp=2, ep=4), rows=1, parallel=ZBV),
    Case("deepseek-mtp", dict(pp=2, cp=2, ep=2), rows=2, parallel=ZBV | dict(layers_per_stage=[1, 2, 1, 1])),
    Case("deepseek-mtp", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=DUAL_PIPE | MERGED),
    Case("qwen3-tied", dict(pp=2, dp_shard=2, tp=2, ep=2), rows=1, parallel=DUAL_PIPE),
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=ZBV | dict(layers_per_stage=[0, 5, 0, 0])),
    Case("deepseek", dict(pp=2, cp=2), rows=1, parallel=DUAL_PIPE | dict(layers_per_stage=[2, 0, 1, 2])),
    Case(
        "deepseek", dict(pp=4, dp_shard=2, ep=2), rows=1, parallel=ZBV | dict(layers_per_stage=[1, 1, 0, 1, 0, 1, 1, 0])
    ),
    Case("qwen3-tied", dict(pp=4), rows=1, parallel=DUAL_PIPE | dict(layers_per_stage=[0, 1, 1, 0, 1, 0, 1, 0])),
    Case("qwen3", dict(pp=2, dp_shard=2, etp=2), rows=1, parallel=HALVES),
    Case("gpt-oss", dict(pp=2, cp=2, ep=2), rows=2, parallel=HALVES, moe=DROP),
    Case("qwen3.5", dict(pp=2, tp=2, ep=2), rows=2, parallel=ZBV),
    Case("deepseek", dict(pp=2, tp=2, etp=2), rows=2, parallel=ZBV, lora=LORA),
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=ZBV | dict(recompute=["layernorm", "mla_up_proj"])),
    Case("glm", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=ZBV, optim=MUON),
    Case("llama", dict(pp=2, tp=2), rows=2, parallel=BREADTH_FIRST),
    Case("mixtral", dict(pp=2, dp_shard=2, ep=2), rows=2, parallel=BREADTH_FIRST | FULL),
    Case("minimax", dict(tp=4, etp=2), rows=8, parallel=PARTS),  # two ranks share a key head
    Case("minimax", dict(pp=2, dp_shard=2, ep=2), rows=2, lora=LORA),
    Case("minimax", dict(dp_shard=2, cp=2, tp=2, ep=2, etp=2), rows=4, optim=MUON),
    Case("olmoe", dict(tp=4, ep=4), rows=4, parallel=FULL),
    Case("olmoe", dict(dp_shard=2, tp=2, ep=2), rows=2, lora=LORA),
    Case("olmoe", dict(pp=2, cp=2, tp=2, ep=2), rows=2),
    Case("granite", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | MERGED),
    Case("granite-unshared", dict(pp=2, tp=2, etp=2), rows=2, parallel=ZBV),
    Case("granite", dict(dp_shard=2, tp=2, ep=2), rows=2, parallel=FULL, lora=LORA),
    Case("granite", dict(dp_replicate=2, cp=2, ep=2), rows=2, parallel=ULYSSES | PARTS),
    Case("deepseek-mtp-scaled", dict(pp=2, dp_shard=2, tp=2, ep=2, etp=2), rows=1, parallel=INTERLEAVED | FULL),
    Case("deepseek-v2", dict(cp=2, tp=2, etp=2), rows=4, parallel=FULL),
    Case("deepseek-v2", dict(dp_shard=2, tp=2, ep=2), rows=2, lora=LORA),
    Case("deepseek-v2", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | MERGED),
    Case("ernie", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=ZBV),
    Case("ernie", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, parallel=PARTS, lora=LORA),
    Case("ernie", dict(dp_replicate=2, cp=2, ep=2), rows=2, parallel=ULYSSES | FULL),
    Case("glm-mtp", dict(pp=2, tp=2, ep=2), rows=2, parallel=INTERLEAVED),
    # modules away from the head: on the rank of the embedding, on two stages, alone, beside a tied head's copy
    Case("deepseek-mtp", dict(pp=2, tp=2, ep=2), rows=2, parallel=INTERLEAVED | dict(layout="Ett|ttt|m|L")),
    Case("deepseek-mtp", dict(pp=3, cp=2, ep=2), rows=2, parallel=dict(layout="Ett|tttm|L")),
    Case("deepseek-mtp", dict(pp=2, dp_shard=2, tp=2, ep=2, etp=2), rows=1, parallel=ZBV | dict(layout="Ett|ttt|m|L")),
    Case(
        "deepseek-mtp", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=DUAL_PIPE | MERGED | dict(layout="Ett|t|ttm|L")
    ),
    Case("deepseek-mtp2", dict(pp=2, tp=2, ep=2), rows=2, parallel=ZBV | dict(layout="Ett|tt|m|mL"), optim=MUON),
    Case("deepseek-mtp2", dict(pp=2, cp=2), rows=2, parallel=DUAL_PIPE | dict(layout="Ett|ttm|m|L")),
    Case("deepseek-mtp2", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=ZBV | dict(layout="Ettttm|m||L")),
    Case(
        "deepseek-mtp2",
        dict(pp=2, dp_shard=2, ep=2),
        rows=1,
        parallel=INTERLEAVED | DELAYED | dict(layout="Ettttmm|||L"),
    ),
    Case(
        "deepseek-mtp2",
        dict(pp=2, cp=2, ep=2),
        rows=2,
        parallel=INTERLEAVED | FULL | dict(layout="Etttt|m|m|L"),
        lora=LORA,
    ),
    Case("deepseek-mtp2", dict(pp=4, tp=2), rows=2, parallel=dict(layout="Ett|ttm|m|L"), document_mask=False),
    Case("glm-mtp", dict(pp=2, tp=2, ep=2), rows=2, parallel=INTERLEAVED | dict(layout="Ett|tt|m|mL")),
    Case("glm-mtp", dict(pp=4, dp_shard=2, ep=2), rows=1, parallel=GPIPE | dict(layout="Etttt|m|m|L")),
    # two of four ranks hold copies of the embedding, and all make equally many groups
    Case("qwen3-tied", dict(pp=4), rows=1, parallel=INTERLEAVED | dict(layers_per_stage=[0, 1, 1, 0, 1, 0, 1, 0])),
    Case("deepseek-mtp2", dict(pp=4), rows=1, parallel=ZBV | dict(layout="Et|t|t|tm|||m|L")),
    Case("glm-mtp", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=HALVES | dict(layout="Ett|ttm|m|L")),
    Case("glm-sparse", dict(pp=2, cp=2, ep=2), rows=2, parallel=INTERLEAVED | dict(layout="Ett|tt|m|L")),
    Case(
        "deepseek-mtp",
        dict(pp=2, dp_shard=2),
        rows=2,
        parallel=INTERLEAVED | dict(layout="Ett|tt|tm|L"),
        train=dict(freeze=["*"], trainable=["layers.5.*"]),
    ),
    Case("deepseek-mtp", rows=1),
    Case(
        "deepseek-mtp",
        dict(pp=2, dp_shard=2, ep=2),
        rows=1,
        parallel=INTERLEAVED | MERGED | dict(layers_per_stage=[0, 4, 1, 0]),
    ),
    Case("glm-mtp", dict(dp_shard=2, ep=2), rows=1, parallel=MERGED),
    Case("deepseek-mtp", dict(pp=2, dp_shard=2, cp=2, ep=4), rows=1, parallel=INTERLEAVED | FULL, **NODES),
    Case("deepseek-mtp", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, optim=MUON),
    Case("deepseek-mtp", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, lora=LORA),
    Case("deepseek-mtp", dict(pp=4, cp=2, ep=2), rows=2, parallel=dict(schedule="1F1B", layers_per_stage=[2, 1, 1, 1])),
    Case("deepseek-mtp", dict(dp_replicate=2, tp=2, ep=2, ep_replicate=2), rows=2, parallel=PARTS, moe=PADDED),
    Case("glm-mtp", dict(pp=2, dp_shard=2, tp=2, etp=2, ep=2), rows=1, parallel=GPIPE, document_mask=False),
    Case("glm-mtp", dict(pp=2, cp=2, tp=2, ep=4), rows=4, lora=LORA),
    Case("glm-mtp", dict(dp_shard=2, cp=2, etp=2), rows=2, parallel=PER_MICRO_BATCH),
    Case("deepseek", dict(pp=2, dp_shard=2, tp=2, ep=2, etp=2), rows=1, parallel=INTERLEAVED, optim=MUON_CLIP),
    Case("qwen3-next", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, optim=MUON),
    Case("gpt-oss", dict(cp=2, tp=2, ep=2), rows=2, optim=MUON_CLIP),
    Case("mixtral", dict(dp_shard=4, ep=2, etp=2), rows=1, optim=MUON_CLIP),
    Case("qwen2", dict(tp=4, ep=4), rows=4, optim=MUON_CLIP),
    Case("deepseek", dict(pp=2, dp_shard=2, tp=2, ep=2, etp=2), rows=1, parallel=INTERLEAVED, lora=LORA),
    Case("gpt-oss", dict(dp_shard=2, tp=2, etp=2), rows=2, document_mask=False, lora=LORA),
    Case("deepseek", rows=2, lora=LORA),
    Case("qwen3", dict(tp=4, ep=4), rows=4, dispatcher="allgather", parallel=FULL, lora=LORA),
    Case("qwen3-tied", dict(pp=2, cp=2, ep=2), rows=2, lora=LORA),
    Case("qwen3-next", dict(dp_shard=2, tp=2, ep=2), rows=2, parallel=PARTS, lora=LORA),
    Case("qwen2", dict(dp_replicate=2, dp_shard=2, tp=2, ep=4, ep_replicate=2), rows=2, lora=LORA, **NODES),
    Case("llama", dict(dp_shard=2, tp=2), rows=4, lora=LORA),
    Case("mixtral", dict(cp=2, ep=2), rows=2, gate="balanced"),
    Case("glm", dict(tp=2, ep=2), rows=2),
    Case("deepseek-direct", dict(tp=4), rows=4),
    Case("mixtral", dict(dp_shard=4, ep=2, etp=2), rows=1),
    Case("mixtral", dict(dp_replicate=2, dp_shard=2, tp=2, ep=2, ep_replicate=2), rows=2, parallel=FULL),
    Case("deepseek-direct", dict(dp_shard=2, cp=2, tp=2, ep=2, etp=2), rows=4, moe=PADDED),
    Case("qwen3", dict(pp=2), rows=2, parallel=GPIPE),
    Case("mixtral", dict(dp_replicate=2), rows=1),
    Case("deepseek", dict(dp_shard=2, ep_replicate=2), rows=2),
    Case("glm", dict(pp=2, dp_shard=2, ep=2), rows=2),
    Case("qwen2", dict(tp=2), rows=4),
    Case("mixtral", dict(cp=4, ep=4), rows=2),
    Case("deepseek", dict(dp_shard=4, ep=2), rows=1),
    Case("qwen3", dict(dp_shard=2, cp=2, ep=4), rows=1),
    Case("mixtral", dict(pp=2, cp=2, ep=2), rows=2, parallel=GPIPE),
    Case("qwen3", dict(cp=2, tp=2, ep=4), rows=4),
    Case("qwen3-tied", dict(pp=2), rows=2),
    Case("gpt-oss", dict(pp=2, tp=2, ep=2), rows=2, parallel=PARTS),
    Case("deepseek-direct", dict(pp=2, tp=2, ep=2), rows=2, parallel=FULL),
    Case("mixtral", dict(pp=2), rows=2, parallel=INTERLEAVED),
    Case("qwen3", dict(pp=2), rows=2, parallel=INTERLEAVED | dict(layers_per_stage=[1, 1, 1, 1])),
    Case("qwen3", dict(dp_shard=2, tp=2, ep=4), rows=1, parallel=MERGED),
    Case(
        "qwen3-next",
        dict(dp_replicate=2, dp_shard=2, ep=4),
        rows=1,
        parallel=MERGED | dict(recompute=["core_attn"]),
        **NODES,
    ),
    Case(
        "deepseek", dict(pp=2, tp=2, ep=2), rows=2, parallel=INTERLEAVED | MERGED | dict(layers_per_stage=[0, 4, 1, 0])
    ),
    Case("deepseek", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, parallel=MERGED, lora=LORA),
    Case("mixtral", dict(dp_shard=4, ep=2), rows=1, parallel=MERGED, moe=DROP),
    # an embedding alone, an empty stage, a head alone
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=2, parallel=INTERLEAVED | dict(layers_per_stage=[0, 5, 0, 0])),
    Case("qwen3-tied", dict(pp=2, tp=2, ep=2), rows=2, parallel=INTERLEAVED | dict(layers_per_stage=[0, 3, 1, 0])),
    Case("deepseek", dict(cp=2), rows=8),
    Case("qwen3", dict(cp=2, ep=2), rows=2),
    Case("mixtral", dict(cp=2, ep=2), rows=2, dispatcher="allgather"),
    Case("qwen3-tied", dict(dp_shard=2), rows=2),
    Case("qwen3", dict(dp_shard=4), rows=2),
    Case("deepseek", dict(dp_shard=4, ep=4), rows=2),
    Case("mixtral", dict(dp_shard=8, ep=4, etp=2), rows=1, moe=PADDED, dispatcher="hierarchical", gpus_per_node=4),
    Case("deepseek", dict(pp=4), rows=2),
    Case("deepseek", dict(dp_replicate=2, dp_shard=2, ep=2), rows=1, dispatcher="allgather"),
    Case("mixtral", dict(dp_replicate=2, dp_shard=2), rows=2, parallel=PER_MICRO_BATCH),
    Case("mixtral", dict(dp_shard=2, cp=2), rows=4),
    Case("deepseek", dict(pp=2, dp_shard=2, ep=2), rows=1),
    Case("qwen3", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED),
    Case("qwen3-tied", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED),
    Case("qwen3", dict(dp_shard=8, ep=8), rows=1),
    Case("mixtral", dict(dp_shard=2, cp=4, ep=8), rows=1, dispatcher="hierarchical", gpus_per_node=4),
    Case("deepseek", dict(dp_replicate=2, dp_shard=2, cp=2, ep=4), rows=2, dispatcher="allgather"),
    Case("qwen3", dict(pp=2, dp_replicate=2, dp_shard=2, ep=2), rows=1),
    Case("mixtral", dict(dp_shard=8, ep=2), rows=1),
    # heads exchanged for positions: latents, one key head for two ranks, shared rotary dims recomputed
    Case("deepseek", dict(cp=2), rows=4, parallel=ULYSSES),
    Case("qwen3", dict(cp=4, ep=2), rows=4, parallel=ULYSSES),
    Case("gpt-oss", dict(dp_shard=2, cp=2, etp=2), rows=2, parallel=ULYSSES, document_mask=False),
    Case("qwen3-next", dict(pp=2, cp=2, ep=2), rows=2, parallel=ULYSSES | INTERLEAVED),
    Case("qwen3-next", dict(cp=2, tp=2, ep=4), rows=4, parallel=ULYSSES | PARTS, lora=LORA),
    Case("qwen3.5", dict(dp_shard=2, cp=2, tp=2, ep=4), rows=2, optim=MUON),
    Case("deepseek-direct", dict(cp=4, ep=4), rows=4, parallel=ULYSSES | dict(recompute=["mla_up_proj", "layernorm"])),
    Case("deepseek-direct", dict(dp_shard=2, cp=2, tp=2, ep=4), rows=2, parallel=ULYSSES | FULL),
    Case("deepseek", dict(pp=2, cp=2, ep=2), rows=2, parallel=ULYSSES | INTERLEAVED | MERGED, optim=MUON_CLIP),
    Case("deepseek-mtp", dict(cp=2, ep=2), rows=4, parallel=ULYSSES | PER_MICRO_BATCH),
    Case("gpt-oss", dict(cp=2, tp=2, ep=2), rows=2, parallel=ULYSSES, optim=MUON_CLIP),
    Case("minimax", dict(cp=2, tp=2, etp=2), rows=4, parallel=ULYSSES | PARTS, lora=LORA),
    Case("olmoe", dict(pp=2, cp=2, tp=2, ep=2), rows=2, parallel=ULYSSES),
    # biases, gated shared experts, partial rotation, dense models
    Case("qwen2", dict(dp_shard=2, cp=2, ep=2), rows=2, parallel=dict(recompute=["shared_experts"])),
    Case("qwen2", dict(pp=2, tp=2, etp=2), rows=2, parallel=INTERLEAVED),
    Case("qwen2", dict(dp_shard=4, ep=2), rows=1, dispatcher="allgather"),
    Case("qwen2", dict(dp_replicate=2, dp_shard=2, tp=2, ep=4, ep_replicate=2), rows=2),
    Case("glm", dict(tp=4, ep=2), rows=4),
    Case("glm", dict(cp=2, tp=2, ep=4), rows=4, parallel=FULL),
    Case("glm", dict(dp_shard=4, etp=2), rows=1),
    Case("glm", dict(dp_replicate=2, dp_shard=2, ep=4), rows=2),
    Case("llama", dict(pp=2, dp_shard=2), rows=2, parallel=INTERLEAVED),
    Case("qwen3-dense", dict(pp=2, cp=2, tp=2), rows=4),
    Case("qwen3-dense", dict(dp_shard=2, tp=2), rows=4, lora=LORA),
    Case("llama", dict(dp_replicate=2, cp=2, tp=2), rows=4, parallel=dict(recompute=["mlp"])),
    # sinks, windows and biases
    Case("gpt-oss", dict(tp=2), rows=8, document_mask=False),
    Case("gpt-oss", dict(dp_shard=4, ep=2, etp=2), rows=1, dispatcher="allgather"),
    Case("gpt-oss", dict(tp=4, etp=4), rows=4, parallel=FULL),
    Case("gpt-oss", dict(dp_replicate=2, tp=2, ep=2, ep_replicate=2), rows=2, moe=PADDED),
    Case("gpt-oss", dict(pp=2, dp_shard=2, cp=2, ep=2, etp=2), rows=2, parallel=INTERLEAVED),
    Case("gpt-oss", dict(dp_shard=2, cp=2, tp=2, etp=2), rows=2, moe=DROP),
    # delta nets
    Case("qwen3-next", dict(tp=4, etp=2), rows=8),
    Case("qwen3.5", dict(tp=4, etp=2), rows=8, parallel=PARTS),
    Case("qwen3.5", dict(dp_shard=2, tp=2, ep=2), rows=2, lora=LORA),
    Case("glm-flash", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2),
    Case("qwen3.5", dict(pp=2, dp_shard=2, ep=2), rows=2, optim=MUON),
    Case("qwen3-next", dict(dp_shard=4, ep=2), rows=1, dispatcher="allgather"),
    Case("qwen3-next", dict(dp_replicate=2, dp_shard=2, tp=2, ep=4), rows=2, parallel=FULL),
    Case("qwen3-next", dict(pp=2, tp=2, ep=2), rows=2, parallel=INTERLEAVED),
    # tp
    Case("mixtral", dict(tp=2), rows=2, parallel=PER_MICRO_BATCH),
    Case("qwen3-tied", dict(tp=2, ep=2), rows=4),
    Case("deepseek", dict(tp=2, ep=2), rows=8, document_mask=False),
    Case("qwen3", dict(dp_shard=2, tp=2), rows=2),
    Case("deepseek", dict(dp_shard=2, tp=2, ep=4), rows=1, moe=DROP | dict(drop_policy="position"), **NODES),
    Case("qwen3", dict(tp=4, ep=2), rows=2, moe=dict(router_jitter=0.1)),
    Case("mixtral", dict(cp=2, tp=2, ep=2), rows=2, dispatcher="allgather"),
    Case("deepseek-direct", dict(tp=4, ep=4), rows=4, parallel=dict(recompute="full", recompute_layers=[1, 3])),
    Case("qwen3", dict(dp_replicate=2, tp=2, ep=4), rows=1),
    # etp
    Case("deepseek", dict(cp=2, etp=2), rows=4),
    Case("qwen3", dict(dp_shard=4, etp=4), rows=2),
    Case("mixtral", dict(dp_shard=4, etp=2), rows=2, dispatcher="allgather"),
    Case("qwen3", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, dispatcher="allgather"),
    Case("deepseek", dict(cp=2, tp=2, etp=4), rows=4),
    Case("mixtral", dict(dp_shard=4, ep=2, etp=2), rows=2, moe=PADDED),
    # ep_replicate
    Case("mixtral", dict(tp=2, ep_replicate=2), rows=2),
    Case("qwen3", dict(dp_shard=4, ep=2, ep_replicate=2), rows=1),
    Case("deepseek", dict(cp=2, tp=2, etp=2, ep_replicate=2), rows=4),
    # pipelines
    Case("mixtral", dict(pp=2, tp=2), rows=2, parallel=GPIPE | PARTS),
    Case("deepseek", dict(pp=2, tp=2, ep=2), rows=2, parallel=dict(layers_per_stage=[1, 4])),
    Case("qwen3", dict(pp=2, dp_shard=2, etp=2), rows=1, parallel=INTERLEAVED | FULL),
    Case("qwen3-tied", dict(pp=2, cp=2, ep_replicate=2), rows=2),
    Case("qwen3-tied", dict(pp=2, dp_replicate=2, tp=2, ep=2), rows=1, parallel=GPIPE),
    # eight ranks
    Case("deepseek", dict(dp_shard=2, cp=2, tp=2, ep=8), rows=1),
    Case("qwen3", dict(dp_shard=2, tp=4, ep=8), rows=1, parallel=dict(recompute=["core_attn"])),
    Case("mixtral", dict(dp_replicate=2, cp=2, tp=2, ep=4, etp=2), rows=2),
    Case("deepseek-direct", dict(pp=2, tp=4, ep=2, etp=2), rows=2, parallel=GPIPE),
    Case("deepseek", dict(pp=2, cp=2, tp=2, ep=4), rows=2, parallel=INTERLEAVED | FULL),
    Case("qwen3", dict(pp=4, tp=2, ep=2), rows=2),
    Case("deepseek", dict(dp_shard=4, tp=2, ep=2, etp=2, ep_replicate=2), rows=1, moe=DROP),
    Case("mixtral", dict(dp_shard=4, tp=2, ep=2), rows=2, moe=dict(micro_batch_balance_coef=0.02)),
    # sixteen ranks
    Case("deepseek", dict(pp=2, dp_shard=2, cp=2, tp=2, ep=4, etp=2), rows=1, parallel=INTERLEAVED),
    Case("qwen3", dict(pp=2, dp_replicate=2, dp_shard=2, tp=2, ep=4, ep_replicate=2), rows=1),
    Case("deepseek-direct", dict(dp_shard=2, cp=2, tp=4, ep=8), rows=2, parallel=FULL),
    Case("mixtral", dict(dp_shard=4, cp=2, tp=2, ep=2, etp=4), rows=1, dispatcher="allgather"),
    Case("qwen3-tied", dict(pp=4, dp_shard=2, tp=2, ep=4), rows=1, parallel=GPIPE),
]
