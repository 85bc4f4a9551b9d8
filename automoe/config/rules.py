"""Rules on single settings, above all the bounds of numbers.

A rule is (configuration key, whether it is broken, the rule with its numbers, the remedy).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from operator import attrgetter

from automoe.config.convert import FromEnvironment, leaf_keys
from automoe.config.rule_engine import Row, Scope, refused, shown, table
from automoe.config.schema import Config
from automoe.errors import ConfigError

# Smallest valid value -> the keys that it bounds.
_AT_LEAST = {
    0: (
        "model.attention.sliding_window train.seed train.epochs train.grad_clip train.spike_factor train.val_every "
        "model.first_k_dense model.num_shared_experts model.num_mtp_layers train.mtp_loss_weight "
        "model.attention.index_topk model.shared_intermediate_size model.norm_eps optim.lr optim.weight_decay "
        "optim.warmup_steps optim.decay_steps optim.min_lr_ratio optim.qk_clip checkpoint.every "
        "checkpoint.every_minutes checkpoint.keep_every checkpoint.keep_best launch.max_restarts "
        "launch.threads_per_rank launch.gc_every launch.probe_every cluster.memory_bytes cluster.peak_flops "
        "cluster.peak_flops_fp8 cluster.memory_bandwidth cluster.intra_node_bandwidth cluster.inter_node_bandwidth "
        "cluster.host_bandwidth cluster.storage_bandwidth cluster.storage_limit moe.capacity_factor "
        "moe.router_jitter moe.seq_balance_coef moe.global_balance_coef moe.micro_batch_balance_coef moe.z_loss_coef "
        "moe.bias_update_rate lora.rank cluster.cores observe.log_every model.moe_latent_size "
        "model.router.num_hash_layers model.residual_gate_temperature model.attention.full_attention_offset "
        "model.hc_mult model.hc_eps model.router.num_zero_experts"
    ),
    1: (
        "train.steps train.global_batch_size train.micro_batch_size train.max_skipped train.val_batches "
        "model.hidden_size model.num_layers model.intermediate_size model.num_experts model.num_experts_per_token "
        "model.moe_intermediate_size model.rope.original_seq_len launch.timeout_s launch.grace_s "
        "model.attention.full_attention_interval model.attention.num_heads model.attention.num_kv_heads "
        "model.attention.q_lora_rank model.router.num_groups model.router.topk_groups model.router.group_score_topk "
        "data.max_bytes checkpoint.keep parallel.stages_per_rank observe.sample_tokens cluster.gpus_per_node "
        "model.hc_sinkhorn_iters"
    ),
    2: "train.seq_len model.vocab_size model.attention.head_dim",
    4: "train.spike_window",
}

# Before all others: a length that extends nothing is not known.
_EXTENSION = table("""
model.rope.extends | model.hf_path == null; model.upcycle; model.random_weights
    | it stretches the rotary embeddings of trained weights, not random or upcycled ones
    | Set model.hf_path=DIR and neither model.upcycle nor model.random_weights, or leave it out
model.rope.scaling != yarn | model.rope.extends | only YaRN extends a checkpoint
lora.export == adapter | model.rope.extends and lora.rank > 0
    | peft loads an adapter onto model.hf_path, whose config.json has other rotary embeddings | Set lora.export=merged
""")
_NUMBERS = table("""
model.initializer_range <= 0; model.rope.theta <= 0; model.rope.factor <= 0; model.rope.beta_fast <= 0;
    model.rope.beta_slow <= 0; model.rope.partial_rotary_factor <= 0; model.rope.low_freq_factor <= 0;
    model.router.routed_scaling_factor <= 0; model.embedding_multiplier <= 0; model.residual_multiplier <= 0;
    model.logits_scaling <= 0; model.router.logit_scale <= 0; cluster.gemm_curve_from <= 0 | | must be larger than 0
optim.eps <= 0 | | must be larger than 0 | Set optim.eps=1e-8
model.rope.partial_rotary_factor > 1 | | the share of a head that is rotated, at most 1
model.rope.high_freq_factor <= model.rope.low_freq_factor | model.rope.scaling == llama3
    | llama3 scaling mixes between low_freq_factor={model.rope.low_freq_factor} and a larger high_freq_factor
    | Set model.rope.high_freq_factor={4 * model.rope.low_freq_factor}
model.rope.attention_factor != null and model.rope.attention_factor <= 0 |
    | rotated dims are multiplied by it: a finite number larger than 0 | Set model.rope.attention_factor=null
model.rope.theta <= 1 | model.rope.scaling == yarn | YaRN divides by its logarithm, so it must be larger than 1
launch.init_timeout_s < launch.timeout_s | | start and end of a run take longer than its steps
""")

CLUSTER_SPEEDS = (
    "memory_bytes peak_flops peak_flops_fp8 memory_bandwidth intra_node_bandwidth inter_node_bandwidth "
    "host_bandwidth storage_bandwidth storage_limit"
).split()
# Names in ``cluster.constants``: speeds are divisors, so they must be above 0; delays may be 0.
SPEEDS = "gemm grouped attention memory on_node off_node imbalance".split()
DELAYS = "fp8 overlap latency host_layer step".split()

# A login in an address: ``//user:password@`` (a password may have a / in it; a path may have an @,
# but no database's address has one elsewhere), or what a query says under a name such as
# ``password=`` or ``token=``.
LOGIN = re.compile(
    r"(?:(?<!\bhttp)(?<!\bhttps)://(?!/)|://(?!/)(?!(?:[^\s/:@]+|\[[\da-fA-F:]+\])(?::\d+)?/))\S*@"
)
SECRET = re.compile(
    r"(?i)([?&;#][\w.-]*(?:pass|pwd|token|secret|credential|api_?key|signature|odbc_connect)[\w.-]*=)[^\s&;#]*"
)


# fmt: off
def number_rows(config: Config) -> Iterator[Row]:
    """Yield (key, whether broken, rule, remedy) of bounds of numbers, e.g. ``train.steps >= 1``.

    Raises:
        ConfigError: ``observe.mlflow`` contains a login; the message does not show it.
    """
    see = Scope(config, config.mesh)
    for key in leaf_keys():
        value = attrgetter(key)(config)
        if isinstance(value, float) and not isfinite(value):
            yield key, True, "must be a finite number", f"Set {key}={shown(attrgetter(key)(Config()))}"
    yield from refused(see, _EXTENSION)
    for least, keys in _AT_LEAST.items():
        for key in keys.split():
            value = attrgetter(key)(config)
            yield key, value is not None and value < least, f"must be at least {least}", f"Set {key}={least} or more"
    yield from refused(see, _NUMBERS)
    uri = config.observe.mlflow
    if not isinstance(uri, FromEnvironment) and (LOGIN.search(uri) or SECRET.search(uri)):
        rule = "a login in it would be kept in config.yaml and shown"
        raise ConfigError("observe.mlflow", re.split(r"[:?]", uri)[0] + "...", rule,
            "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or observe.mlflow='${oc.env:NAME}'")
    for key in (*CLUSTER_SPEEDS, "gemm_curve_from", "gpus_per_node", "cores"):
        value = getattr(config.cluster, key)
        yield (f"cluster.{key}", value != 0 and not 1 <= value <= 1e24, "0, or from 1 to 1e24 (times stay finite)",
               f"Set cluster.{key} in bytes or FLOPs per second")
    curve = config.cluster.gemm_curve
    yield ("cluster.gemm_curve", curve != [] and (len(curve) < 2 or not all(1e-6 <= share <= 1 for share in curve)),
           "two or more shares of cluster.peak_flops, each from 1e-6 to 1", "Set cluster.gemm_curve=[]")
    constants = config.cluster.constants
    yield ("cluster.constants", not constants.keys() <= {*SPEEDS, *DELAYS}, f"its keys are {', '.join((*SPEEDS, *DELAYS))}",
           "Leave the others out")
    yield ("cluster.constants", not all((1e-6 if name in SPEEDS else 0) <= value <= 1e6
                                        for name, value in constants.items()),
           f"from 0 to 1e6, and {', '.join(SPEEDS)} from 1e-6", "Leave it out: automoe/planner/constants.toml has others")
    links = config.cluster.links
    named = all(re.fullmatch(r"(all_gather|reduce_scatter|all_to_all|send) [1-9]\d*x[1-9]\d*", name) for name in links)
    yield "cluster.links", not named, 'a name is a collective with size and stride, such as "send 2x4"', "Calibrate again"
    possible = all(len(link) == 2 and 0 <= link[0] <= 1e6 and 1 <= link[1] <= 1e24 for link in links.values())
    yield ("cluster.links", not possible,
           "seconds from 0 to 1e6, then bytes/s from 1 to 1e24", "Calibrate again, or set cluster.links={}")
