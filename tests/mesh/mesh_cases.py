"""Models, rows and runs of the mesh suite; ranks import this too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.data_schema import DataConfig
from automoe.config.layout import with_layout
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    ClusterConfig,
    Config,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    RopeConfig,
    RouterConfig,
    TrainConfig,
)
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.toys import DEEPSEEK, QWEN3, SIZES, VOCAB
from tests.support.trajectories import run_trajectory

ROWS, SEQ_LEN = 8, 16
STEPS = 3

MODELS = {
    "deepseek": replace(
        DEEPSEEK,
        num_layers=5,
        rope=RopeConfig(
            interleaved=True, scaling="yarn", factor=4.0, original_seq_len=8, mscale=1.0, mscale_all_dim=1.0
        ),
        router=replace(DEEPSEEK.router, routed_scaling_factor=2.5),
    ),
    "qwen3": QWEN3,
    "mixtral": ModelConfig(
        family="mixtral",
        num_layers=4,
        num_experts_per_token=2,
        attention=AttentionConfig(kind="gqa", num_heads=2, num_kv_heads=1, head_dim=8),
        **SIZES,
    ),
}
# Sinks, biases, a window of 5 every other layer, a limit that some gates and ups exceed.
MODELS["gpt-oss"] = ModelConfig(
    family="gpt_oss",
    num_layers=4,
    num_experts_per_token=3,
    biased_experts=True,
    expert_activation="clamped_swiglu",
    swiglu_limit=0.5,
    attention=AttentionConfig(
        kind="gqa",
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        full_attention_interval=2,
        sliding_window=5,
    ),
    rope=RopeConfig(scaling="yarn", factor=4.0, original_seq_len=8, truncate=False),
    router=RouterConfig(softmax_after_topk=True, logit_bias=True),
    **SIZES,
)
# Three delta nets, one gated attention of which half a head turns; norms around one; a gated shared expert.
MODELS["qwen3-next"] = ModelConfig(
    family="qwen3_next",
    num_layers=4,
    num_experts_per_token=3,
    num_shared_experts=1,
    shared_expert_gate=True,
    zero_centered_norms=True,
    norm_eps=1e-2,
    attention=AttentionConfig(
        kind="gqa",
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qk_norm=True,
        output_gate=True,
        full_attention_interval=4,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=6,
        linear_value_head_dim=4,
    ),
    rope=RopeConfig(partial_rotary_factor=0.5),
    **SIZES,
)
# Projections of delta nets split as in Qwen3.5.
MODELS["qwen3.5"] = replace(
    MODELS["qwen3-next"],
    family="qwen3_5_moe_text",
    attention=replace(MODELS["qwen3-next"].attention, linear_split_projections=True),
)
# Gates of the residual, experts on a latent, norms of all outputs, full layers without rotation, one dense layer.
MODELS["muse"] = ModelConfig(
    family="muse_spark_text",
    num_layers=4,
    first_k_dense=1,
    intermediate_size=24,
    num_experts_per_token=3,
    moe_latent_size=8,
    zero_centered_norms=True,
    plain_final_norm=True,
    post_norm_eps=1e-6,
    embedding_norm=True,
    residual_gate_temperature=0.3,
    logits_scaling=1 / 0.7,
    final_logit_softcapping=3.0,
    attention=AttentionConfig(
        kind="gqa",
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qk_norm=True,
        qk_scale_factor=2.5,
        qkv_bias=True,
        o_bias=True,
        output_gate=True,
        split_output_gate=True,
        output_norm=True,
        full_attention_interval=3,
        full_attention_offset=2,
        nope_full_attention=True,
        sliding_window=5,
    ),
    rope=RopeConfig(theta=50.0),
    router=RouterConfig(score="sigmoid", expert_bias=True, routed_scaling_factor=1.5, logit_scale=0.7),
    **SIZES,
)
MODELS["qwen3-tied"] = replace(MODELS["qwen3"], tie_embeddings=True)
# Kimi's form: one direct query projection, no groups of experts; and more heads, for tp4.
MODELS["deepseek-direct"] = replace(
    MODELS["deepseek"],
    num_shared_experts=2,
    # With tp, a latent as wide as what it expands to: cp gathers keys and values themselves.
    attention=replace(MODELS["deepseek"].attention, q_lora_rank=None, kv_lora_rank=24, num_heads=4, num_kv_heads=4),
    router=replace(MODELS["deepseek"].router, num_groups=1, topk_groups=1),
)

MODELS["glm-flash"] = replace(MODELS["deepseek"], family="glm4_moe_lite")

# Biases on queries, keys and values, a gated shared expert, weights that do not sum to one.
MODELS["qwen2"] = ModelConfig(
    family="qwen2_moe",
    num_layers=4,
    num_experts_per_token=3,
    num_shared_experts=2,
    shared_expert_gate=True,
    attention=AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=6, qkv_bias=True),
    router=RouterConfig(norm_topk_prob=False),
    **SIZES,
)
# Half of each head turns; biases and normalised queries and keys; sigmoid scores of one group.
MODELS["glm"] = ModelConfig(
    family="glm4_moe",
    num_layers=5,
    first_k_dense=1,
    intermediate_size=24,
    num_experts_per_token=3,
    num_shared_experts=1,
    attention=AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True),
    rope=RopeConfig(theta=50.0, partial_rotary_factor=0.5),
    router=RouterConfig(score="sigmoid", expert_bias=True, routed_scaling_factor=2.5),
    **SIZES,
)
# Queries and keys normed over all heads, which tp spreads; half of each head turns.
MODELS["minimax"] = ModelConfig(
    family="minimax_m2",
    num_layers=4,
    num_experts_per_token=3,
    attention=AttentionConfig(
        kind="gqa", num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, qk_norm_over_heads=True
    ),
    rope=RopeConfig(theta=50.0, partial_rotary_factor=0.5),
    router=RouterConfig(score="sigmoid", expert_bias=True),
    **SIZES,
)
# The same norms, biases, and a bound that some queries, keys and values exceed.
MODELS["olmoe"] = ModelConfig(
    family="olmoe",
    num_layers=4,
    num_experts_per_token=3,
    attention=AttentionConfig(
        kind="gqa",
        num_heads=4,
        num_kv_heads=4,
        head_dim=4,
        qk_norm=True,
        qk_norm_over_heads=True,
        qkv_bias=True,
        o_bias=True,
        clip_qkv=0.8,
    ),
    router=RouterConfig(norm_topk_prob=False),
    **SIZES,
)
# A shared expert, and a factor or divisor wherever the decoder takes one; logits are capped as well.
MULTIPLIERS = dict(embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=0.7, final_logit_softcapping=0.5)
MODELS["granite"] = ModelConfig(
    family="granitemoeshared",
    num_layers=4,
    num_experts_per_token=3,
    shared_intermediate_size=20,
    hidden_act="gelu_pytorch_tanh",
    attention=AttentionConfig(
        kind="gqa", num_heads=4, num_kv_heads=2, head_dim=6, qkv_bias=True, o_bias=True, multiplier=0.7
    ),
    router=RouterConfig(softmax_after_topk=True),
    **(SIZES | MULTIPLIERS),
)
MODELS["granite-unshared"] = replace(
    MODELS["granite"], family="granitemoe", shared_intermediate_size=0, logits_scaling=0.5
)
# A softmax chooses in the groups with the best experts; a bias chooses, and pairs of dims turn in every head.
MODELS["deepseek-v2"] = replace(
    MODELS["deepseek"],
    family="deepseek_v2",
    router=RouterConfig(
        norm_topk_prob=False, routed_scaling_factor=2.5, num_groups=4, topk_groups=2, group_score_topk=1
    ),
)
MODELS["ernie"] = ModelConfig(
    family="ernie4_5_moe",
    num_layers=4,
    first_k_dense=1,
    intermediate_size=24,
    num_experts_per_token=3,
    num_shared_experts=2,
    tie_embeddings=True,
    attention=AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=6),
    rope=RopeConfig(theta=50.0, interleaved=True),
    router=RouterConfig(expert_bias=True),
    **SIZES,
)
# One and two modules for multi-token prediction; the last ones read a tied embedding, which is the head too.
MODELS["deepseek-mtp"] = replace(MODELS["deepseek"], num_mtp_layers=1)
MODELS["deepseek-mtp-scaled"] = replace(MODELS["deepseek-mtp"], **MULTIPLIERS)
MODELS["deepseek-mtp2"] = replace(MODELS["deepseek"], num_layers=4, num_mtp_layers=2)
MODELS["glm-mtp"] = replace(MODELS["glm"], num_layers=4, num_mtp_layers=2, tie_embeddings=True)
# Each query sees three keys, which an indexer chooses.
# Heads with keys of their own, without a norm of theirs.
MODELS["mixtral-mha"] = replace(
    MODELS["mixtral"], attention=replace(MODELS["mixtral"].attention, num_heads=4, num_kv_heads=4, head_dim=6)
)
MODELS["deepseek-sparse"] = replace(
    MODELS["deepseek"],
    family="deepseek_v32",
    attention=replace(MODELS["deepseek"].attention, index_topk=3, index_n_heads=3, index_head_dim=6),
)
# One head, so that many keys tie, and layers that use the choice of the layer before them.
MODELS["glm-sparse"] = replace(
    MODELS["deepseek-sparse"],
    family="glm_moe_dsa",
    num_layers=4,
    num_mtp_layers=1,
    attention=replace(
        MODELS["deepseek-sparse"].attention,
        index_topk=5,
        index_n_heads=1,
        index_interleaved=True,
        index_shared_layers=[1, 3],
    ),
)
# Three streams of the residual, a table of token ids in the first layer, windows of two and three positions. Before the
# first layer all streams are equal: mixing them by columns that sum to one, or weighting them before a norm, would have no
# gradient but rounding.
MODELS["deepseek-v4"] = ModelConfig(
    family="deepseek_v4",
    num_layers=4,
    num_experts_per_token=3,
    num_shared_experts=1,
    expert_activation="clamped_swiglu",
    swiglu_alpha=1.0,
    swiglu_offset=0.0,
    swiglu_limit=0.5,
    hc_mult=3,
    hc_sinkhorn_iters=2,
    hc_eps=0.05,
    norm_eps=1e-1,
    attention=AttentionConfig(
        kind="compressed",
        num_heads=4,
        num_kv_heads=1,
        head_dim=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        sliding_window=3,
        sinks=True,
        o_groups=2,
        o_lora_rank=6,
        index_topk=2,
        index_n_heads=3,
        index_head_dim=6,
        compress_ratios=[0, 3, 2, 2],
        sparse_ratio=2,
        compress_rope_theta=90.0,
    ),
    rope=RopeConfig(theta=50.0, interleaved=True),
    router=RouterConfig(score="sqrt_softplus", expert_bias=True, routed_scaling_factor=1.5, num_hash_layers=1),
    **SIZES,
)
# Pairs of layers: experts of the first are added after the second. Some choices are of experts that pass their token on.
MODELS["longcat"] = ModelConfig(
    family="longcat_flash",
    num_layers=4,
    intermediate_size=24,
    shared_intermediate_size=24,
    num_experts_per_token=3,
    moe_shortcut=True,
    attention=replace(DEEPSEEK.attention, scale_latents=True),
    rope=RopeConfig(interleaved=True),
    router=RouterConfig(norm_topk_prob=False, routed_scaling_factor=2.5, expert_bias=True, num_zero_experts=4),
    **SIZES,
)
MODELS["longcat-deep"] = replace(MODELS["longcat"], num_layers=8)
# No experts at all.
MODELS["llama"] = ModelConfig(
    family="llama",
    num_layers=4,
    first_k_dense=4,
    intermediate_size=24,
    attention=AttentionConfig(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=6),
    rope=RopeConfig(scaling="llama3", factor=4.0, original_seq_len=16),
    **SIZES,
)
MODELS["qwen3-dense"] = replace(
    MODELS["llama"],
    family="qwen3",
    attention=replace(MODELS["llama"].attention, qk_norm=True),
    rope=RopeConfig(),
    tie_embeddings=True,
)


@dataclass(frozen=True)
class Case:
    """One mesh with a model and the way it is run."""

    family: str
    mesh: dict[str, int] = field(default_factory=dict)
    rows: int = 1  # of one micro-batch
    dispatcher: str = "alltoall"
    parallel: dict[str, object] = field(default_factory=dict)
    gate: str = "learned"
    document_mask: bool = True
    moe: dict[str, object] = field(default_factory=dict)
    lora: dict[str, object] = field(default_factory=dict)
    optim: dict[str, object] = field(default_factory=dict)
    train: dict[str, object] = field(default_factory=dict)
    gpus_per_node: int = 8  # where the dispatcher asks

    @property
    def world_size(self) -> int:
        return resolve_mesh(self.config.mesh, None).world_size

    @property
    def config(self) -> Config:
        mesh, model = MeshConfig(**({"dp_shard": 1} | self.mesh)), MODELS[self.family]
        plain = Config(
            mesh=mesh,
            model=model,
            moe=MoEConfig(
                dispatcher=self.dispatcher,
                experts="grouped_mm" if "expert_wgrad" in self.parallel else "loop",
                gate=self.gate,
                seq_balance_coef=0.02,
                global_balance_coef=0.03,
                z_loss_coef=0.01,
                bias_update_rate=0.02,
                **self.moe,
            ),
            parallel=ParallelConfig(**self.parallel),
            lora=LoraConfig(**self.lora),
            optim=OptimConfig(**self.optim),
            cluster=ClusterConfig(gpus_per_node=self.gpus_per_node),
            train=TrainConfig(
                seq_len=SEQ_LEN, global_batch_size=ROWS, micro_batch_size=self.rows, dtype="float64", **self.train
            ),
            data=DataConfig(document_mask=self.document_mask),
        )
        return with_layout(plain)

    @property
    def reference(self) -> Case:
        """The same run on one rank, the whole batch at once, nothing padded, recomputed or evaluated."""
        moe = {key: value for key, value in self.moe.items() if key != "pad_to_capacity"}
        train = {key: value for key, value in self.train.items() if key != "val_every"}
        whole = dict(mesh={}, rows=ROWS, dispatcher="alltoall", gpus_per_node=8, parallel={})
        return replace(self, moe=moe, train=train, **whole)

    def __str__(self) -> str:
        axes = "-".join(f"{axis}{size}" for axis, size in self.mesh.items()) or "one"
        extra = f"-nodes of {self.gpus_per_node}" if self.dispatcher == "hierarchical" else ""
        extra += "" if self.gate == "learned" else f"-{self.gate}gate"
        extra += "" if self.document_mask else "-nomask"
        extra += "".join(
            f"-{value if isinstance(value, str) and key == 'schedule' else f'{key}={value}'}"
            for key, value in (self.parallel | self.moe | self.lora | self.optim | self.train).items()
        )
        return f"{self.family}-{axes}-mb{self.rows}-{self.dispatcher}{extra}".replace(" ", "").replace("'", "")


def batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Rows of a step: documents of random length, two rows with padding, one without a trained label."""
    generator = torch.Generator().manual_seed(step)
    # No token twice in a row: tokens that are alike, with pasts that are alike, have routing weights equal
    # up to rounding, and capacity by probability would then drop by rounding.
    tokens = torch.rand(ROWS, VOCAB, generator=generator).argsort(1)[:, : SEQ_LEN + 1]
    starts = torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.15
    starts[:, 0] = False
    doc_ids = starts.long().cumsum(1)
    index = torch.arange(SEQ_LEN).expand(ROWS, SEQ_LEN)
    positions = index - torch.where(starts, index, 0).cummax(1).values
    labels = tokens[:, 1:].clone()
    labels[:, :-1][doc_ids[:, 1:] != doc_ids[:, :-1]] = IGNORE
    for row, padding in ((2, 3), (ROWS - 1, SEQ_LEN - 2)):
        doc_ids[row, -padding:] = -1
        labels[row, -padding - 1 :] = IGNORE
    labels[4] = IGNORE
    mine = slice(dp_rank * ROWS // dp_size, (dp_rank + 1) * ROWS // dp_size)
    return StepBatch(tokens[mine, :-1], labels[mine], positions[mine], doc_ids[mine], num_bytes=0, first_row=mine.start)


def run_case(pool: RankPool, case: Case, steps: int = STEPS) -> Trajectory:
    """The case on its own mesh."""
    return merge_trajectories(pool.run(run_trajectory, case.world_size, case.config, batches, steps))


def float32(case: Case) -> Config:
    """The same run in float32 with ``grouped_mm``."""
    config = case.config
    return replace(config, moe=replace(config.moe, experts="grouped_mm"), train=replace(config.train, dtype="float32"))
