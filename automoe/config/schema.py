"""The whole configuration as typed dataclasses: what a YAML file may say, with defaults and units.

Nothing here imports torch or Hydra, so that a config error is found in milliseconds.
Letters in comments: T tokens, S sequence, E experts, K top-k, H hidden, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from automoe.config.data_schema import NO_TOKENIZER, DataConfig


@dataclass
class MeshConfig:
    """Two views of the same ranks (arXiv 2504.14960); ``pp`` is outermost in both.

    default: pp x dp_replicate x dp_shard x cp x tp; moe: pp x ep_replicate x ep_shard x ep x etp.
    ``-1`` (dp_shard, ep_shard) is derived. See ``automoe.config.mesh_shape.MeshShape``.
    """

    pp: int = 1  # pipeline stages
    dp_replicate: int = 1  # copies of the sharded model, each with its part of the batch
    dp_shard: int = -1  # FSDP: parameters cut, and the batch; -1: what the other axes leave
    cp: int = 1  # rows cut along the sequence
    tp: int = 1  # attention and dense layers cut by heads and widths
    ep_replicate: int = 1  # as dp_replicate, of the experts
    ep_shard: int = -1  # as dp_shard, of the experts
    ep: int = 1  # whole experts shared out
    etp: int = 1  # each expert cut by its width
    preset: str = ""  # a named folding, scaled to the ranks at hand (docs/parallelism.md)


@dataclass
class RopeConfig:
    """Rotary embedding; ``yarn`` is YaRN (arXiv 2309.00071) with DeepSeek's mscale, ``llama3`` that
    of Llama 3.1."""

    theta: float = 10000.0  # base of the angles
    interleaved: bool = False  # pairs (2i, 2i+1) as DeepSeek stores them, instead of (i, i + D/2)
    # gqa: this share of a head's first dims turns, the rest does not
    partial_rotary_factor: float = 1.0
    scaling: Literal["none", "yarn", "llama3"] = "none"
    factor: float = 1.0  # how far scaling stretches
    original_seq_len: int = 4096  # row length before scaling
    # yarn: dims that turn more often over original_seq_len stay as they are ...
    beta_fast: float = 32.0
    beta_slow: float = 1.0  # ... and those that turn less are stretched by the whole factor
    truncate: bool = True  # yarn: the borders of its ramp are whole dims (GPT-OSS: they are not)
    mscale: float = 0.0  # yarn: scale of the rotated dims, over that of mscale_all_dim
    mscale_all_dim: float = 0.0  # yarn and llama3: scale of the attention logits
    # yarn: scale of the rotated dims; null: by factor and the mscales
    attention_factor: float | None = None
    # llama3: stretched below this many turns over original_seq_len ...
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0  # ... kept above this many, and in between in between


@dataclass
class AttentionConfig:
    """``gqa`` uses num_kv_heads, head_dim, qk_norm, qkv_bias; ``mla`` the ranks and split head
    dims."""

    kind: Literal["gqa", "mla"] = "gqa"
    num_heads: int = 8  # of queries
    num_kv_heads: int = 8  # gqa: of keys and values; divides num_heads
    head_dim: int = 32  # gqa: width of a head
    qk_norm: bool = False  # gqa: RMS norm of each head's query and key
    qkv_bias: bool = False  # of the projections to queries, keys and values
    q_lora_rank: int | None = None  # mla: rank of the query projection; null: one direct product
    kv_lora_rank: int = 0  # mla: width of the latent that keys and values come from
    qk_nope_head_dim: int = 0  # mla: dims of a head's query and key that do not turn
    qk_rope_head_dim: int = 0  # mla: dims that do; the key's are shared by all heads
    v_head_dim: int = 0  # mla: width of a head's value
    o_bias: bool = False  # gqa: of the output projection
    # gqa: a learned score a head that every query also attends to, for no value
    sinks: bool = False
    # gqa: what leaves a head is multiplied by sigmoid of a second query projection
    output_gate: bool = False
    # every n-th layer sees whole rows; for those between, the keys below
    full_attention_interval: int = 1
    sliding_window: int = 0  # layers between: this many keys, the query's own position included
    # layers between: a gated delta net (Qwen3-Next); its state runs through the row
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0  # delta net: a multiple of its key heads
    linear_key_head_dim: int = 0  # delta net: width of a key head
    linear_value_head_dim: int = 0  # delta net: width of a value head
    linear_conv_kernel_dim: int = 4  # delta net: tokens that its causal convolution sees


@dataclass
class RouterConfig:
    """How a token chooses experts: data, not subclasses. Order: score, select, weight."""

    # of the logits (docs/routing.md)
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    # choose by logits, then softmax over the K chosen instead of all E
    softmax_after_topk: bool = False
    norm_topk_prob: bool = True  # divide the K chosen scores by their sum
    routed_scaling_factor: float = 1.0  # multiplies the weights
    num_groups: int = 1  # groups of experts; 1 switches group limiting off
    topk_groups: int = 1  # this many groups with the best scores take part
    group_score_topk: int = 2  # a group's score is the sum of its best this many biased scores
    expert_bias: bool = False  # auxiliary-loss-free balancing (arXiv 2408.15664)
    logit_bias: bool = False  # the router's product has a trained bias
    exact_ties: bool = False  # equal scores go to the lowest index; costs a sort of all E scores


@dataclass
class ModelConfig:
    """One decoder for every family; the names follow HuggingFace where a checkpoint meets a
    user."""

    family: Literal[
        "deepseek_v3",
        "qwen3_moe",
        "mixtral",
        "qwen2_moe",
        "glm4_moe",
        "gpt_oss",
        "qwen3_next",
        "llama",
        "qwen3",
    ] = "deepseek_v3"
    # start from this HuggingFace checkpoint: a directory, or a Hub id OWNER/NAME[@REVISION]
    hf_path: str | None = None
    # hf_path is dense: experts start as its FFNs, or equal parts of them (docs/upcycle.md)
    upcycle: bool = False
    vocab_size: int = 264  # rows of the embedding; at least the tokenizer's ids
    hidden_size: int = 256
    num_layers: int = 4
    intermediate_size: int = 512  # FFN width of the dense layers
    first_k_dense: int = 0  # this many first layers have a dense FFN instead of experts
    num_experts: int = 8  # routed experts a layer; 0: a dense model
    num_experts_per_token: int = 2  # top-k
    moe_intermediate_size: int = 128  # width of a routed expert
    num_shared_experts: int = 0  # one shared FFN of this many times moe_intermediate_size
    # or of this width, a multiple or not; 0: as num_shared_experts says
    shared_intermediate_size: int = 0
    shared_expert_gate: bool = False  # its output times sigmoid(x @ w), one number a token
    biased_experts: bool = False  # routed experts add a trained bias to both of their products
    expert_activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"  # clamped: GPT-OSS
    # clamped_swiglu: up and gate within the limit, (up + 1) gate sigmoid(alpha gate)
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0  # clamped_swiglu
    norm_eps: float = 1e-6
    zero_centered_norms: bool = False  # norms multiply by 1 + weight; those of delta nets do not
    tie_embeddings: bool = False  # the head is the embedding
    initializer_range: float = 0.02  # standard deviation of first weights
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts: all after the dense ones. 0: a dense model."""
        return self.num_layers - self.first_k_dense

    @property
    def shared_width(self) -> int:
        """Width of the shared FFN; 0: there is none."""
        return self.shared_intermediate_size or self.num_shared_experts * self.moe_intermediate_size


@dataclass
class MoEConfig:
    """How the MoE layer runs; none of it changes a checkpoint."""

    # hierarchical: a token goes once to a node of cluster.gpus_per_node ranks; deepep: CUDA, and
    # DeepEP installed
    dispatcher: Literal["alltoall", "allgather", "hierarchical", "deepep"] = "alltoall"
    # CUDA: on a stream of their own, at the same time as the routed experts
    overlap_shared_experts: bool = True
    experts: Literal["grouped_mm", "loop", "triton", "te", "quack"] = "grouped_mm"
    # Gates other than learned are for benchmarks (automoe.moe.router): round robin, skewed,
    # everything to the first K experts, round robin without the last expert.
    gate: Literal["learned", "balanced", "zipf", "one_hot", "empty"] = "learned"
    router_dtype: Literal["float32", "bfloat16"] = "float32"  # at least, of the router's product
    router_jitter: float = 0.0  # training: the router's input times uniform(1 - jitter, 1 + jitter)
    # 0: dropless; else an expert takes at most ceil(factor * T * K / E)
    capacity_factor: float = 0.0
    # what stays: the most probable, or the first of every row
    drop_policy: Literal["probs", "position"] = "probs"
    # T: this rank's tokens (depends on the mesh), or a row
    drop_scope: Literal["rank", "sequence"] = "rank"
    # every expert computes exactly its capacity: static shapes, same result
    pad_to_capacity: bool = False
    seq_balance_coef: float = 0.0  # c of the per-row balance loss (DeepSeek-V3, eq. 17)
    global_balance_coef: float = 0.0  # c of the balance loss over the previous step's whole batch
    # c of the balance loss per micro-batch of all ranks (classical)
    micro_batch_balance_coef: float = 0.0
    z_loss_coef: float = 0.0  # c of the mean squared logsumexp of the router's logits
    bias_update_rate: float = 1e-3  # b += rate * sign(mean - count), once per optimizer step
    record_routing: str | None = None  # directory that takes every step's choices
    replay_routing: str | None = None  # directory of another run's choices, to repeat on any mesh


@dataclass
class ParallelConfig:
    """How a model meets the mesh."""

    schedule: Literal["GPipe", "1F1B", "Interleaved1F1B"] = "1F1B"
    stages_per_rank: int = 1  # more than 1 only with Interleaved1F1B
    layers_per_stage: list[int] | None = None  # null: as even as it goes, short stages last
    reshard: Literal["step", "micro_batch"] = "step"  # when FSDP frees gathered weights
    grad_sync: Literal["step", "micro_batch"] = "step"  # when FSDP reduces gradients
    # cp attention; ring needs CUDA and no document mask
    context: Literal["gather", "ring"] = "gather"
    # What runs again in the backward pass instead of being kept: names among core_attn, mlp, moe,
    # shared_experts, layernorm, mla_up_proj and moe_act, or full.
    recompute: list[str] | str = field(default_factory=list)
    recompute_layers: list[int] | str | None = None  # null: all; layer numbers, or "every N"


@dataclass
class KernelsConfig:
    """Which implementation computes what; none of it changes a checkpoint (``docs/kernels.md``)."""

    # sdpa: the best of torch's for the head dims, the mask and the device; the others are forced
    attention: Literal["sdpa", "cudnn", "flash", "math", "te"] = "sdpa"
    rope: Literal["torch", "triton"] = "torch"  # rotation of heads, and MLA's keys put together
    norm: Literal["torch", "te"] = "torch"  # te: CUDA, and transformer-engine installed


@dataclass
class TrainConfig:
    """What is trained: length, batch, precision, and steps that are skipped."""

    steps: int = 200  # optimizer steps
    seq_len: int = 256  # tokens of a row
    global_batch_size: int = 16  # rows per optimizer step over all ranks
    micro_batch_size: int = 2  # rows per forward on one data-parallel rank
    seed: int = 0  # of first weights and of the order of data
    # bfloat16: see optim.master_weights
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    # Products of attention, FFNs and experts in 8 bits, and what has a scale (docs/fp8.md): a
    # matrix by its own largest number, by that of the steps before, or blocks of it.
    fp8: Literal["off", "tensorwise", "delayed", "blockwise"] = "off"
    # attention with its norms, FFNs, router and loss by torch.compile; experts are not
    compile: bool = False
    # or one that a plugin registers (docs/extend.md)
    loss: Literal["cross_entropy"] = "cross_entropy"
    grad_clip: float = 1.0  # maximum global gradient norm; 0 switches clipping off
    max_skipped: int = 10  # steps skipped in a row, for whatever reason, before the run gives up
    # skip a step whose loss is this many deviations above recent ones; 0: never
    spike_factor: float = 0.0
    spike_window: int = 100  # losses that make up the recent ones
    # Parameters that stay as they are, by patterns of their names, such as "*.router.*"; with LoRA
    # all do.
    freeze: list[str] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)  # patterns: exceptions from what is frozen
    val_every: int = 50  # steps between validations; 0 switches them off
    val_batches: int = 2  # global batches per validation


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) beside the matrices of a frozen model
    (``docs/lora.md``)."""

    rank: int = 0  # of every adapter; 0: no adapters, the model itself is trained
    alpha: float = 32.0  # what adapters compute is multiplied by alpha / rank
    dropout: float = 0.0  # share of each adapter's input features that a step leaves out
    # groups of matrices (one that the model lacks is no error), or such as q_proj, mlp.up_proj,
    # experts.down_proj
    targets: list[str] = field(
        default_factory=lambda: ["attention", "mlp", "shared_experts", "experts"]
    )
    export: Literal["merged", "adapter"] = "merged"  # adapter: what peft loads beside model.hf_path
    # frozen matrices: as multiplied, FP8 as stored, or 4 bits
    base: Literal["weights", "fp8", "nf4"] = "weights"


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-3  # the highest, after warm-up
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 20  # the learning rate rises linearly
    decay_steps: int = 50  # wsd: length of the final linear decay
    min_lr_ratio: float = 0.1  # the last learning rate over the highest
    # float32: parameters as wide as train.dtype says, bfloat16 ones in float32. stochastic: those
    # are kept in bfloat16 alone, and updates are rounded stochastically
    master_weights: Literal["float32", "stochastic"] = "float32"
    # bfloat16: rounded stochastically, with either kind of master weights; those of routers stay in
    # float32
    moments: Literal["float32", "bfloat16"] = "float32"
    # Of an exponential moving average of the trained weights, in float32: 0.999 is over about a
    # thousand steps; 0: none
    ema_decay: float = 0.0


@dataclass
class CheckpointConfig:
    """Training state on disk (``docs/reliability.md``)."""

    # auto: go on from run_dir's newest valid checkpoint; never: start over and set them aside; or
    # the run or step directory of another run, to start from where run_dir has no checkpoint yet.
    resume: str = "auto"
    every: int = 0  # steps between training-state saves; 0: none
    every_minutes: float = 0.0  # and minutes between them, by the clock of rank 0; 0: none
    async_save: bool = False  # write in the background, from a copy in CPU memory
    keep: int = 2  # newest checkpoints kept
    # checkpoints of steps that divide by it are never deleted; 0: no such steps
    keep_every: int = 0
    keep_best: int = 0  # this many checkpoints with the lowest validation loss are kept as well
    export_hf: bool = True  # write a HuggingFace checkpoint at the end of the run
    export_ema: bool = False  # it holds the averages of optim.ema_decay, and not the last weights

    @property
    def saves(self) -> bool:
        """Whether training state is saved at all."""
        return self.every > 0 or self.every_minutes > 0


@dataclass
class ObserveConfig:
    """What a run shows and records."""

    log_every: int = 1  # steps between lines on the console; metrics.jsonl has every step
    # Prompts that are answered after each validation: a list, or a text file with one on each line
    # (docs/finetune.md)
    samples: list[str] | str = field(default_factory=list)
    sample_tokens: int = 48  # at most, of an answer
    report: bool = True  # report.html and PNG plots at the end, or when the run dies
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    wandb_project: str = "automoe"
    tensorboard: bool = False  # event files in run_dir/tensorboard
    mlflow: str = ""  # MLflow's tracking URI: a server, or a folder; empty: no MLflow
    mlflow_experiment: str = "automoe"
    run_name: str | None = None  # in trackers; null: that of run_dir
    run_group: str | None = None  # in trackers; null: the sweep that the run is a job of
    run_tags: list[str] = field(default_factory=list)  # in trackers
    # what a sweeper such as Optuna is to find the best of
    objective: Literal["loss", "tokens_per_second"] = "loss"
    profile_steps: str = ""  # "10-12": torch profiler traces of these steps under run_dir/profile


@dataclass
class LaunchConfig:
    """How ranks are started and watched (``docs/launch.md``)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_ranks: int | None = None  # ranks that a derived (-1) axis fills; null: all it can see
    timeout_s: int = 600  # a collective that takes longer fails and names its rank
    # the same until the first step is over and after the last: loading, compiling, export
    init_timeout_s: int = 1800
    # after SIGTERM or Ctrl-C: to finish the step and save, before ranks are killed
    grace_s: int = 120
    max_restarts: int = 0  # times that a failed run is started again, from its newest checkpoint
    threads_per_rank: int = 1  # CPU threads of one rank; 0: the cores, shared out evenly
    # steps between collections of Python's garbage, on all ranks at once; 0: as Python likes
    gc_every: int = 50
    # bind each rank on CUDA to the CPU cores next to its GPU; torchrun and srun offer it themselves
    numa: bool = False
    # steps between timings of one product on every rank, which name a slow one; 0: none
    probe_every: int = 10


@dataclass
class ClusterConfig:
    """Hardware the plan and the MFU are computed for. Bytes and FLOP per second."""

    name: str = "laptop"  # shown in the plan
    gpu: str = "cpu"  # name as torch reports it, for the table of peak FLOPs
    gpus_per_node: int = 8
    memory_bytes: float = 0.0  # per GPU; 0: unknown
    peak_flops: float = 0.0  # dense bf16 per GPU; 0: unknown
    peak_flops_fp8: float = 0.0  # dense 8 bits per GPU; 0: it has none
    memory_bandwidth: float = 0.0  # bytes a second of a GPU's memory; 0: unknown
    # bytes a second and direction, of one GPU to its node; 0: unknown
    intra_node_bandwidth: float = 0.0
    inter_node_bandwidth: float = 0.0  # the same, to other nodes
    host_bandwidth: float = 0.0  # of one GPU to CPU memory; 0: taken as 16e9
    storage_bandwidth: float = 0.0  # of one node to where checkpoints are; 0: taken as 2e9
    storage_limit: float = 0.0  # of all nodes together to it; 0: it grows with the nodes
    # Share of peak_flops that a matrix product reaches which does 64, 128, 256, ... 4096 FLOPs for
    # each byte that it reads and writes; none: not measured, and what is predicted is called
    # uncalibrated
    gemm_curve: list[float] = field(default_factory=list)
    gemm_curve_from: float = 64.0  # FLOPs for each byte of the curve's first share
    # CPU cores that the ranks of a node share, all of their work; 0: every rank has a device of its
    # own
    cores: int = 0
    # measured here, in place of automoe/planner/constants.toml
    constants: dict[str, float] = field(default_factory=dict)


@dataclass
class Config:
    """A run."""

    run_dir: str = "runs/default"
    # a name, a file or a module whose main(config, shape, context) a rank runs
    recipe: str = "pretrain"
    # keys that the recipe declares, in its dataclass Args (docs/launch.md)
    recipe_args: Any = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)  # modules that register names of a user's own
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def tokenizer_of(config: Config) -> str:
    """``byte``, a directory or ``none``: ``data.tokenizer``, else that of the checkpoint that
    training starts from."""
    return (
        NO_TOKENIZER
        if config.data.is_synthetic
        else config.data.tokenizer or config.model.hf_path or "byte"
    )


def export_name(config: Config) -> str | None:
    """The folder in a run's own that it writes at its end: ``hf``, or ``adapter``; None where it
    exports nothing."""
    if not config.checkpoint.export_hf:
        return None
    return "adapter" if config.lora.rank > 0 and config.lora.export == "adapter" else "hf"


def sources_of(data: DataConfig) -> list[tuple[str, float, DataConfig]]:
    """Name, weight and settings of each source; without ``data.sources`` the only one, whose name
    is empty."""
    if not data.sources:
        return [("", 1.0, data)]
    found = []
    for source in data.sources:
        given = {key: value for key, value in vars(source).items() if value is not None}
        own: dict[str, Any] = {
            key: given[key] for key in ("kind", "text_key", "subset", "split") if key in given
        }
        own["chat"] = replace(
            data.chat, **{key: given[key] for key in ("format", "keys", "roles") if key in given}
        )
        place = (source.path or source.kind or data.kind).rstrip("/").rpartition("/")[2]
        name = source.name or place.partition(".")[0]
        found.append((name, source.weight, replace(data, **own, path=source.path, sources=[])))
    return found


def window_of(attention: AttentionConfig, layer: int) -> int:
    """Keys that a query of layer ``layer`` sees at most, itself included; 0: all before it."""
    return 0 if _full(attention, layer) else attention.sliding_window


def is_linear(attention: AttentionConfig, layer: int) -> bool:
    """Whether layer ``layer`` is a gated delta net."""
    return attention.linear_num_key_heads > 0 and not _full(attention, layer)


def _full(attention: AttentionConfig, layer: int) -> bool:
    return (layer + 1) % attention.full_attention_interval == 0
