"""Sections of the configuration about training: ``train``, ``lora`` and ``optim``.

Nothing here imports torch or Hydra.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automoe.config.data_schema import Shown
from automoe.config.paths import PathText


@dataclass
class TrainConfig:
    """Settings of length, batch, precision, loss, frozen parameters and validation.

    ``epochs``, if set, replaces ``steps``. Batch sizes count rows of ``seq_len`` tokens, and
    ``rampup_batch_size`` is [rows of the first batch, rows added at a time, rows until it has
    grown]. ``max_skipped`` skipped steps in a row end the run; ``spike_factor`` skips a step whose
    loss is so many deviations above the median of the last ``spike_window`` losses. ``fp8`` says
    how matmuls are scaled, ``indexer`` whether attention sees the keys that indexers choose
    (sparse) or all, and indexers alone are trained (warmup). ``freeze`` and ``trainable`` are
    patterns of parameter names; ``trainable`` wins. ``val_every`` counts steps, ``val_batches``
    global batches.
    """

    steps: int = 200  # optimizer steps
    # passes over the rows of the training split, in whole batches: they replace steps; 0: steps counts
    epochs: float = 0.0
    seq_len: int = 256  # tokens per row
    global_batch_size: int = 16  # rows per optimizer step, over all ranks
    # [start, increment, rows]: the global batch begins with start rows and grows by increment rows
    # at a time until it has global_batch_size, evenly over that many rows of training
    rampup_batch_size: list[int] | None = None
    micro_batch_size: int = 2  # rows per forward pass of one data-parallel rank
    seed: int = 0  # seed of the initial weights and of the order of the data
    # precision of activations and matrix products; optim.master_weights has that of the parameters
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    # compute the matrix products of attention, FFNs and experts in 8 bits (docs/fp8.md).
    # tensorwise: one scale per tensor, from its own largest value; delayed: one scale per tensor,
    # from the largest values of earlier steps; blockwise: one scale per block of a tensor
    fp8: Literal["off", "tensorwise", "delayed", "blockwise"] = "off"
    # compile attention with its norms, FFNs, router and loss by torch.compile; not the experts
    compile: bool = False
    # loss function: cross_entropy, or the name of one that a plugin registers (docs/extend.md)
    loss: Literal["cross_entropy"] = "cross_entropy"
    # model.num_mtp_layers: weight of the mean of the modules' losses beside the main loss
    mtp_loss_weight: float = 0.3
    # model.attention.index_topk: what attention sees and indexers learn from. sparse: the chosen keys;
    # warmup: all keys, while all parameters but the indexers' are frozen
    indexer: Literal["sparse", "warmup"] = "sparse"
    grad_clip: float = 1.0  # maximum global gradient norm; 0: no clipping
    max_skipped: int = 10  # the run ends after this many skipped steps in a row
    # skip a step whose loss is this many standard deviations above recent losses; 0: never
    spike_factor: float = 0.0
    spike_window: int = 100  # number of recent losses that spike_factor compares with
    # patterns of parameter names to freeze, such as "*.router.*"; LoRA freezes all parameters
    freeze: list[str] = field(default_factory=list)
    # patterns of parameter names to train even though freeze or LoRA freezes them
    trainable: list[str] = field(default_factory=list)
    val_every: int = 50  # steps between validations; 0: no validation
    val_batches: int = 2  # global batches per validation


@dataclass
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685) on the matrices of a frozen model (``docs/lora.md``).

    ``path`` is a peft adapter to start from, ``targets`` are groups or names of matrices, and
    ``base`` is how frozen matrices are stored. ``export`` writes the merged model or the adapters
    alone.
    """

    rank: int = 0  # rank of every adapter; 0: no adapters, the model itself is trained
    # folder of a peft adapter to start from, which model.hf_path may name too: trained further with
    # its rank, alpha and targets, or with rank=0 merged into the weights
    path: PathText | None = None
    alpha: float = 32.0  # an adapter's output is multiplied by alpha / rank
    dropout: float = 0.0  # dropout probability of an adapter's input features
    # matrices that get adapters: groups (one that the model lacks is no error), or names such as
    # q_proj, mlp.up_proj, experts.down_proj
    targets: list[str] = field(
        default_factory=lambda: ["attention", "mlp", "shared_experts", "experts"]
    )
    # merged: export the model with its adapters merged; adapter: export the adapters alone, which
    # peft loads onto model.hf_path
    export: Literal["merged", "adapter"] = "merged"
    # storage of frozen matrices. weights: in train.dtype; fp8: in 8 bits, as the checkpoint stores
    # them; nf4: in 4 bits
    base: Literal["weights", "fp8", "nf4"] = "weights"


@dataclass(repr=False)
class Phase(Shown):
    """A phase of training (``optim.phases``), ``steps`` long.

    The learning rate goes along the curve ``decay`` from the previous phase's last rate (at first
    ``optim.lr``) to ``lr_ratio * optim.lr``; ``constant`` is at that rate from the first step on.
    The other keys replace ``moe.bias_update_rate`` and ``train.mtp_loss_weight`` meanwhile; null
    keeps them.
    """

    steps: int = 0  # optimizer steps of the phase
    lr_ratio: float = 1.0  # learning rate of its last step divided by optim.lr
    # curve from the previous phase's learning rate; constant: lr_ratio from the first step on
    decay: Literal["constant", "linear", "cosine"] = "constant"
    bias_update_rate: float | None = None  # replaces moe.bias_update_rate; null: keeps it
    mtp_loss_weight: float | None = None  # replaces train.mtp_loss_weight; null: keeps it


@dataclass
class OptimConfig:
    """Settings of the optimizer, AdamW or Muon, and of the learning-rate schedule.

    Muon updates the matrices of layers, and AdamW all other parameters. ``lr`` is the peak learning
    rate; the final one is ``min_lr_ratio`` times as large. ``schedule=wsd`` reads ``decay_steps``,
    ``schedule=phases`` reads the list ``phases``, and Muon reads ``momentum`` and ``muon_dtype``.
    ``master_weights`` and ``moments`` are number formats. ``ema_decay`` averages the weights, and
    ``qk_clip`` limits attention logits (MuonClip); 0 turns either off.
    """

    # muon: the matrices of layers are updated by Muon (arXiv 2502.16982), all other parameters by
    # AdamW, with the same learning rate and weight decay
    algorithm: Literal["adamw", "muon"] = "adamw"
    momentum: float = 0.95  # of Muon, with Nesterov's step
    # dtype in which Muon exchanges and orthogonalises matrices. float32: that of the parameters, at
    # least float32; bfloat16: half the bytes, and an update that depends on the mesh by rounding
    muon_dtype: Literal["float32", "bfloat16"] = "float32"
    lr: float = 3e-3  # peak learning rate, after warm-up
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # for matrices; norms and biases are not decayed
    schedule: Literal["cosine", "wsd", "constant", "phases"] = "cosine"
    warmup_steps: int = 20  # steps in which the learning rate rises linearly
    decay_steps: int = 50  # wsd: steps of the linear decay at the end
    min_lr_ratio: float = 0.1  # final learning rate divided by the peak
    # what follows the warm-up if schedule=phases; their steps sum to train.steps - warmup_steps
    phases: list[Phase] = field(default_factory=list)
    # parameters that the optimizer updates if train.dtype=bfloat16. float32: a float32 copy;
    # stochastic: the bfloat16 parameters themselves, with stochastic rounding
    master_weights: Literal["float32", "stochastic"] = "float32"
    # precision of AdamW's moments; bfloat16 rounds stochastically, with either kind of master
    # weights, and leaves the moments of routers in float32
    moments: Literal["float32", "bfloat16"] = "float32"
    # decay of an exponential moving average of the trained weights, kept in float32: 0.999 averages
    # over about a thousand steps; 0: no average
    ema_decay: float = 0.0
    # QK-clip of MuonClip (arXiv 2507.20534): after a step, scale down the queries and keys of each
    # head that had an attention logit above this limit (Kimi K2: 100); 0: never
    qk_clip: float = 0.0
