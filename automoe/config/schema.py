"""The whole configuration as typed dataclasses: what a YAML file may say, with defaults and units.

Nothing here imports torch or Hydra, so that a config error is found in milliseconds.
Letters in comments: T tokens, S sequence, E experts, K top-k, H hidden, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from automoe.config.attention_schema import AttentionConfig, RopeConfig
from automoe.config.data_schema import NO_TOKENIZER, DataConfig
from automoe.config.paths import PathText
from automoe.config.run_schema import ClusterConfig, LaunchConfig, ObserveConfig
from automoe.config.train_schema import LoraConfig, OptimConfig, TrainConfig


@dataclass
class MeshConfig:
    """Two views of the same ranks (arXiv 2504.14960), a mesh for dense layers and one for experts.

    Dense layers: pp x dp_replicate x dp_shard x cp x tp; experts: pp x ep_replicate x ep_shard x ep
    x etp. Both products are the number of ranks; ``-1`` (dp_shard, ep_shard) is derived from it.
    ``0`` takes the size of ``preset``, or 1 without one.
    """

    pp: int = 0  # ranks of a pipeline; the layers are split into stages over them
    # replicas of the FSDP-sharded model (HSDP); each trains on its own part of the batch
    dp_replicate: int = 0
    # ranks that FSDP shards non-expert parameters over, each with its own part of the batch; -1:
    # all ranks that the other axes leave
    dp_shard: int = -1
    cp: int = 0  # context parallelism: ranks that split each row along the sequence
    tp: int = 0  # tensor parallelism: ranks that split attention heads and dense FFN widths
    ep_replicate: int = 0  # replicas of each expert that FSDP shards (HSDP for experts)
    ep_shard: int = -1  # ranks that FSDP shards an expert's parameters over; -1: derived
    ep: int = 0  # expert parallelism: ranks that divide the experts of a layer among them
    etp: int = 0  # expert tensor parallelism: ranks that split the width of every expert
    preset: str = ""  # a named mesh, scaled to the number of ranks (docs/parallelism.md)


@dataclass
class RouterConfig:
    """How a token chooses K of E experts: score the experts, select K, weight their outputs.

    With ``num_groups`` > 1 it selects from the ``topk_groups`` groups of experts with the highest
    sums of their ``group_score_topk`` best scores. ``expert_bias`` adds to the scores, for the
    selection alone, a bias that balances the load; ``logit_bias`` is a trained one. Of equal scores
    ``exact_ties`` selects the expert with the lowest index. In the first ``num_hash_layers`` a
    table of token ids selects. Zero experts follow the others and compute nothing.
    """

    # function that turns the router's logits into scores (docs/routing.md)
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    # select by logits, and take the softmax over the K selected ones instead of over all E
    softmax_after_topk: bool = False
    norm_topk_prob: bool = True  # divide the K selected scores by their sum
    routed_scaling_factor: float = 1.0  # factor on the weights of the selected experts
    # groups that the experts are divided into; 1: a token may choose among all experts
    num_groups: int = 1
    topk_groups: int = 1  # groups that a token may choose from: those with the highest scores
    # a group's score is the sum of this many of its highest scores (with expert_bias added)
    group_score_topk: int = 2
    # select by score + bias, and adjust the bias after each step: balancing without an auxiliary
    # loss (arXiv 2408.15664; moe.bias_update_rate)
    expert_bias: bool = False
    logit_bias: bool = False  # a trained bias in the router's projection
    # of equal scores, select the expert with the lowest index; costs a sort of all E scores
    exact_ties: bool = False
    # first layers with experts in which a table of token ids, not the scores, selects the experts
    # (DeepSeek-V4); scores weight them
    num_hash_layers: int = 0
    logit_scale: float = 1.0  # factor of the router's logits (Muse-Spark)
    # experts beyond model.num_experts that have no weights (LongCat-Flash, arXiv 2509.01322): a token
    # that chooses them has fewer experts that compute
    num_zero_experts: int = 0
    # what a zero expert gives: its input (identity), times the weight of the choice, or nothing (zero)
    zero_expert_type: Literal["identity", "zero"] = "identity"


@dataclass
class ModelConfig:
    """Architecture and sizes of the decoder; names follow HuggingFace.

    One decoder computes all families but ``transformers``, whose ``architecture`` is a class of
    transformers. ``hf_path`` is the checkpoint to start from, with ``upcycle`` a dense one. Rows of
    new tokens start as the mean of all rows, or of those of the token's pieces (``new_rows``).
    """

    family: Literal[
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
        "qwen3_moe",
        "mixtral",
        "qwen2_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5_moe_text",
        "minimax_m2",
        "olmoe",
        "granitemoe",
        "granitemoeshared",
        "deepseek_v2",
        "ernie4_5_moe",
        "deepseek_v4",
        "muse_spark_text",
        "longcat_flash",
        "llama",
        "qwen3",
        "transformers",
    ] = "deepseek_v3"
    # family=transformers: class of transformers that computes the model of hf_path
    architecture: str = ""
    # HuggingFace checkpoint to start from: a directory, or a Hub id OWNER/NAME[@REVISION]; null:
    # start from random weights
    hf_path: PathText | None = None
    # hf_path gives config.json and the tokenizer alone, and weights are random
    random_weights: bool = False
    # hf_path is a dense model, and experts start as copies or equal parts of its FFNs
    # (docs/upcycle.md)
    upcycle: bool = False
    # rows of the embedding; at least the number of the tokenizer's ids. More than a checkpoint has:
    # new rows start as the mean of its rows
    vocab_size: int = 264
    # rows of tokens that the tokenizer of hf_path lacks. mean: as above, and rows that the checkpoint
    # has stay; pieces: the mean of the rows of the token's text under that tokenizer
    new_rows: Literal["mean", "pieces"] = "mean"
    hidden_size: int = 256
    num_layers: int = 4
    # modules for multi-token prediction after the last layer; 0: none (docs/mtp.md)
    num_mtp_layers: int = 0
    intermediate_size: int = 512  # FFN width of the dense layers
    first_k_dense: int = 0  # number of first layers that have a dense FFN instead of experts
    num_experts: int = 8  # routed experts per layer
    num_experts_per_token: int = 2  # K: experts that each token chooses
    moe_intermediate_size: int = 128  # width of a routed expert
    # width of what routed experts read and give, which two projections take from hidden_size and
    # back, the first with a norm (Muse-Spark); 0: hidden_size
    moe_latent_size: int = 0
    # the shared experts are one FFN, num_shared_experts * moe_intermediate_size wide; 0: none
    num_shared_experts: int = 0
    # width of the shared FFN if it is no such multiple; 0: num_shared_experts determines it
    shared_intermediate_size: int = 0
    # layers are pairs: the shared experts of the first are its dense FFN, and what its routed experts
    # give is added after the second, which has none (LongCat-Flash, arXiv 2404.05019)
    moe_shortcut: bool = False
    # multiply the shared FFN's output by sigmoid(x @ w), one number per token
    shared_expert_gate: bool = False
    biased_experts: bool = False  # trained biases in both projections of routed experts
    # f in every FFN and expert: down(f(gate) * up); relu2 is relu squared
    hidden_act: Literal["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"] = "silu"
    # swiglu: f as hidden_act says. clamped_swiglu (GPT-OSS, DeepSeek-V4), in every FFN and expert: clamp
    # gate and up to swiglu_limit, then (up + swiglu_offset) * gate * sigmoid(swiglu_alpha * gate)
    expert_activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    swiglu_alpha: float = 1.702  # clamped_swiglu: factor inside the sigmoid
    swiglu_offset: float = 1.0  # clamped_swiglu: added to up
    swiglu_limit: float = 7.0  # clamped_swiglu: largest gate and largest absolute up
    norm_eps: float = 1e-6
    # RMS norms multiply by 1 + weight, except those inside delta nets (Qwen3-Next)
    zero_centered_norms: bool = False
    # the norm before the head multiplies by its weight all the same (Muse-Spark)
    plain_final_norm: bool = False
    # epsilon of RMS norms of what attention (without a weight), a feed-forward and each expert give
    # (multiplied by 1 + weight before they are normalised, Muse-Spark); null: no such norms
    post_norm_eps: float | None = None
    embedding_norm: bool = False  # RMS norm without a weight of the embedding's rows (Muse-Spark)
    tie_embeddings: bool = False  # the output head shares the embedding's weight
    embedding_multiplier: float = 1.0  # factor of the embedding's rows (Granite)
    residual_multiplier: float = 1.0  # factor of what a block adds to the residual stream (Granite)
    logits_scaling: float = 1.0  # logits are divided by it (Granite)
    # streams of the residual, which hyper-connections mix (DeepSeek-V4, arXiv 2512.24880); 0: one
    # stream, to which a block adds
    hc_mult: int = 0
    # hyper-connections: times that rows and columns of the mixing matrix are normalised
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6  # hyper-connections: added to weights and to divisors
    # residual and a block's output are weighted dim by dim, by gates whose parameter is divided by
    # this temperature (Muse-Spark); 0: no gates
    residual_gate_temperature: float = 0.0
    # logits are c * tanh(logits / c) for this c (Gemma); null: as they are
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02  # standard deviation of random initial weights
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    @property
    def moe_layers(self) -> range:
        """Numbers of the layers with routed experts: those after dense ones, or the first of pairs.

        Modules for multi-token prediction are counted too.
        """
        return self.all_layers[self.first_k_dense :: self.layers_together]

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with routed experts; 0 for a dense model."""
        return len(self.moe_layers)

    @property
    def layers_together(self) -> int:
        """Number of layers that a pipeline stage holds together: 2 with ``moe_shortcut``."""
        return 1 + self.moe_shortcut

    @property
    def num_dense_layers(self) -> int:
        """Number of layers without experts."""
        return len(self.all_layers) - self.num_moe_layers

    @property
    def num_scored_experts(self) -> int:
        """Number of experts that a router scores: those with weights, then zero experts."""
        return self.num_experts + self.router.num_zero_experts

    @property
    def all_layers(self) -> range:
        """Numbers of all decoder layers, and of the modules for multi-token prediction last."""
        return range(self.num_layers + self.num_mtp_layers)

    @property
    def residual_width(self) -> int:
        """Width of the hidden states between layers: that of all streams of the residual."""
        return max(self.hc_mult, 1) * self.hidden_size

    @property
    def centers_final_norm(self) -> bool:
        """True if the norm before the head multiplies by 1 + weight."""
        return self.zero_centered_norms and not self.plain_final_norm

    @property
    def expert_hidden_size(self) -> int:
        """Width of the rows that routed experts read and give."""
        return self.moe_latent_size or self.hidden_size

    @property
    def shared_width(self) -> int:
        """FFN width of all shared experts together; 0 without shared experts."""
        return self.shared_intermediate_size or self.num_shared_experts * self.moe_intermediate_size


@dataclass
class MoEConfig:
    """Settings of MoE layers: how they run and are balanced.

    A ``dispatcher`` sends tokens to their experts, in the format ``dispatch_dtype``. A ``gate`` other than
    ``learned`` replaces the router's choices in benchmarks. ``capacity_factor`` limits an expert's tokens of a rank or
    of a row (``drop_scope``); ``drop_policy`` says which ones stay. ``record_routing`` and ``replay_routing`` are
    directories of chosen experts, ``*_coef`` coefficients of auxiliary losses. No key changes a checkpoint's format.
    """

    # how tokens travel to the ranks of their experts. hierarchical: a token crosses the network
    # once per node of cluster.gpus_per_node ranks; deepep: needs CUDA and the package DeepEP
    dispatcher: Literal["alltoall", "allgather", "hierarchical", "deepep"] = "alltoall"
    # format of tokens on their way to the experts. auto: as computed; fp8: e4m3, with a scale for
    # every 128 columns. Results and gradients travel as computed
    dispatch_dtype: Literal["auto", "fp8"] = "auto"
    # CUDA: run the shared experts on their own stream, at the same time as the routed experts
    overlap_shared_experts: bool = True
    # implementation of the routed experts' matrix products (docs/kernels.md)
    experts: Literal["grouped_mm", "loop", "triton", "te"] = "grouped_mm"
    # learned: the router chooses. The others are for benchmarks. balanced: round robin; zipf:
    # skewed; one_hot: every token to the first K experts; empty: round robin without the last
    # expert
    gate: Literal["learned", "balanced", "zipf", "one_hot", "empty"] = "learned"
    # lowest precision of the router's projection: float32 computes it in float32 even if
    # train.dtype=bfloat16
    router_dtype: Literal["float32", "bfloat16"] = "float32"
    # in training, multiply the router's input by uniform(1 - jitter, 1 + jitter)
    router_jitter: float = 0.0
    # 0: no token is dropped; else an expert takes at most ceil(factor * T * K / E) tokens
    capacity_factor: float = 0.0
    # tokens that stay if an expert is over capacity. probs: those with the highest weights;
    # position: the first ones of every row
    drop_policy: Literal["probs", "position"] = "probs"
    # T of capacity_factor: the tokens of a rank, which depend on the mesh, or of a row
    drop_scope: Literal["rank", "sequence"] = "rank"
    # pad every expert's input to its capacity: static shapes, same result
    pad_to_capacity: bool = False
    # coefficient of the balance loss of each row (DeepSeek-V3, eq. 17)
    seq_balance_coef: float = 0.0
    # coefficient of the balance loss over the previous step's global batch
    global_balance_coef: float = 0.0
    # coefficient of the classical balance loss, over one micro-batch of all ranks
    micro_batch_balance_coef: float = 0.0
    z_loss_coef: float = 0.0  # coefficient of the mean squared logsumexp of the router's logits
    # model.router.expert_bias: after each optimizer step, bias += rate * sign(mean - count), with
    # the counts of tokens per expert
    bias_update_rate: float = 1e-3
    record_routing: PathText | None = None  # directory to write every step's chosen experts to
    # directory of another run's record_routing, whose choices are repeated on any mesh
    replay_routing: PathText | None = None


@dataclass
class ParallelConfig:
    """Settings of the pipeline schedule, FSDP, context parallelism and recomputation.

    ``layout`` is a pipeline layout in Megatron-Core's notation. ``reshard`` and ``grad_sync`` say
    whether FSDP frees weights and reduces gradients after every micro-batch or once a step.
    ``expert_wgrad`` says what adds weight gradients of experts to the step's sum: FSDP, or their own
    matmul (fused; delayed: computed while gradients of tokens travel back). ``recompute`` lists
    modules, or is full (whole layers), in the layers ``recompute_layers``: numbers, or every N.
    """

    # order of a rank's passes with mesh.pp > 1 (docs/pipelines.md)
    schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "LoopedBFS",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    # pipeline stages per rank; GPipe and 1F1B: 1, ZBVZeroBubble and DualPipeV: 2, others: more
    stages_per_rank: int = 1
    # layers of each stage; null: equal numbers, the longer stages first if they cannot be equal
    layers_per_stage: list[int] | None = None
    # the two keys above in Megatron-Core's notation, e.g. "Et*3|(tt|)*29L": E embedding, t layer, m
    # module for multi-token prediction, L head and loss, | border of two stages; stages may be empty
    layout: str | None = None
    # run the forward pass of one micro-batch together with the backward pass of another, so that
    # each computes while the other's all-to-all over ep is on its way
    overlap_all_to_all: bool = False
    # FSDP frees gathered weights at the end of a step, or after every micro-batch
    reshard: Literal["step", "micro_batch"] = "step"
    # FSDP reduces gradients at the end of a step, or after every micro-batch
    grad_sync: Literal["step", "micro_batch"] = "step"
    # gradients of the experts' matrices. autograd: autograd returns them, and FSDP adds them to its
    # sum of the step. fused: their products add to that sum themselves. delayed: fused, and computed
    # while gradients of tokens travel back, which needs overlap_all_to_all
    expert_wgrad: Literal["autograd", "fused", "delayed"] = "autograd"
    # attention with mesh.cp > 1: gather all keys and values; ulysses: exchange positions for heads,
    # so that each rank has whole rows of some heads; or pass keys and values around a ring, which
    # on CUDA needs data.document_mask=false. Delta nets exchange heads with any of them
    context: Literal["gather", "ulysses", "ring"] = "gather"
    # modules whose activations are recomputed in the backward pass instead of kept: a list of
    # core_attn, mlp, moe, shared_experts, layernorm, mla_up_proj and moe_act; or full, the whole
    # layer
    recompute: list[str] | str = field(default_factory=list)
    # layers that parallel.recompute applies to: layer numbers, or "every N"; null: all layers
    recompute_layers: list[int] | str | None = None


@dataclass
class KernelsConfig:
    """Implementations of attention, rotary embedding, loss and norms (``docs/kernels.md``).

    No key changes a checkpoint's format.
    """

    # sdpa: torch picks its best kernel for the head dims, the mask and the device; the others name
    # one kernel. flex: FlexAttention, compiled, which masks documents by their borders
    attention: Literal["sdpa", "cudnn", "flash", "flex", "math", "te"] = "sdpa"
    # rotary embedding; triton also assembles MLA's keys in the same kernel
    rope: Literal["torch", "triton"] = "torch"
    # cross-entropy; triton passes over a chunk of logits twice, torch seven times
    loss: Literal["torch", "triton"] = "torch"
    norm: Literal["torch", "te"] = "torch"  # te: needs CUDA and the package transformer-engine


@dataclass
class CheckpointConfig:
    """Settings for saving, resuming and exporting the training state (``docs/reliability.md``).

    ``resume`` is auto (newest checkpoint in ``run_dir``), never, or a run's or checkpoint's path. A save
    is due after ``every`` steps and ``every_minutes``; 0 turns either off. The newest ``keep``
    checkpoints are kept, those whose step ``keep_every`` divides, and the ``keep_best`` ones with the
    lowest validation loss. ``async_save`` writes in the background. At the end ``export_hf`` writes a
    HuggingFace checkpoint, with the averaged weights if ``export_ema`` is set.
    """

    # auto: continue from the newest valid checkpoint in run_dir, if any; never: start over, and
    # rename the old checkpoints; a path: start from that run directory or step directory as long as
    # run_dir has no checkpoint of its own
    resume: PathText = "auto"
    every: int = 0  # save the training state every this many steps; 0: not by steps
    # save also if this many minutes have passed since the last save, by rank 0's clock; 0: not by
    # time
    every_minutes: float = 0.0
    async_save: bool = False  # write in the background, from a copy in CPU memory
    keep: int = 2  # number of newest checkpoints to keep
    keep_every: int = 0  # keep checkpoints of steps that this number divides; 0: no such steps
    keep_best: int = 0  # number of checkpoints with the lowest validation loss to keep as well
    export_hf: bool = True  # write a HuggingFace checkpoint at the end of the run
    export_ema: bool = False  # export the averages of optim.ema_decay instead of the last weights

    @property
    def saves(self) -> bool:
        """True if the run saves its training state."""
        return self.every > 0 or self.every_minutes > 0


@dataclass
class Config:
    """The configuration of a run: directory, training loop (``recipe``) and its own keys, plugins, sections."""

    run_dir: PathText = "runs/default"  # directory of all files of the run
    # training loop: a shipped recipe's name, a file or a module; every rank calls its
    # main(config, shape, context)
    recipe: PathText = "pretrain"
    # keys that the recipe declares in its dataclass Args (docs/launch.md)
    recipe_args: Any = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)  # the user's modules that register more names
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
    """Return ``data.tokenizer``, else ``model.hf_path``, else ``byte``: bytes are the tokens.

    The result is ``none`` if the data has no text.
    """
    if config.data.is_synthetic:
        return NO_TOKENIZER
    return config.data.tokenizer or config.model.hf_path or "byte"


def export_name(config: Config) -> str | None:
    """Return the name of the run directory's folder for the export: ``hf`` or ``adapter``.

    None if the run exports nothing. ``recipe=upcycle`` always exports to ``hf``.
    """
    if config.recipe == "upcycle":
        return "hf"
    if not config.checkpoint.export_hf:
        return None
    return "adapter" if config.lora.rank > 0 and config.lora.export == "adapter" else "hf"


def window_of(attention: AttentionConfig, layer: int) -> int:
    """Return a layer's sliding window in tokens, including the query's own; 0: full attention."""
    return 0 if _full(attention, layer) else attention.sliding_window


def has_token_table(model: ModelConfig, layer: int) -> bool:
    """Return True if a table of token ids selects the experts of layer number ``layer``."""
    return 0 <= layer - model.first_k_dense < model.router.num_hash_layers


def has_rotation(attention: AttentionConfig, layer: int) -> bool:
    """Return True if rotary embeddings apply to layer number ``layer``."""
    return not (attention.nope_full_attention and _full(attention, layer))


def is_linear(attention: AttentionConfig, layer: int) -> bool:
    """Return True if layer number ``layer`` is a gated delta net."""
    return attention.linear_num_key_heads > 0 and not _full(attention, layer)


def has_blocks(attention: AttentionConfig, layer: int) -> bool:
    """Return True if layer number ``layer`` has softmax attention to single keys, computed in blocks of queries.

    Its masks are made once for all layers. Compressed attention and gated delta nets give False.
    """
    return not (attention.kind == "compressed" or is_linear(attention, layer))


def has_indexer(attention: AttentionConfig, layer: int) -> bool:
    """Return True if layer number ``layer`` has an indexer, which selects its keys (DeepSeek-V3.2).

    Other layers of such a model use the selection of an earlier layer. With compressed attention
    (DeepSeek-V4) the layers with compression ratio ``sparse_ratio`` have an indexer, and in the
    others no keys are selected.
    """
    if attention.kind == "compressed":
        return ratio_of(attention, layer) == attention.sparse_ratio
    return attention.index_topk > 0 and layer not in attention.index_shared_layers


def ratio_of(attention: AttentionConfig, layer: int) -> int:
    """Return how many positions are pooled into one key ("entry") of compressed attention; 0: no pooling."""
    return attention.compress_ratios[layer] if attention.kind == "compressed" else 0


def _full(attention: AttentionConfig, layer: int) -> bool:
    number = layer + 1 - attention.full_attention_offset
    return attention.kind != "compressed" and number % attention.full_attention_interval == 0
