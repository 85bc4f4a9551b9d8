from __future__ import annotations

from pathlib import Path

import pytest

from automoe.config.data_schema import ChatConfig, DataConfig
from automoe.config.schema import Config
from automoe.config.validate import check_writable, validate
from automoe.errors import ConfigError
from automoe.launch import prepare
from automoe.launch.run_dir import locked
from tests.support.configurations import quick_config


def small(*overrides: str) -> Config:
    """The default on one mesh of plain data parallelism, so that one rule is met at a time."""
    return quick_config(overrides=["mesh=fsdp", *overrides])


def check(num_ranks: int, *overrides: str, device: str | None = None) -> None:
    prepare.check(small(*overrides), num_ranks, device)


BAD = [
    # ranks, overrides, key, the rule with its numbers, the remedy
    (4, ["mesh.dp_shard=0"], "mesh.dp_shard", "at least 1 rank", "mesh.dp_shard=1"),
    (4, ["mesh.dp_shard=-2"], "mesh.dp_shard", "at least 1 rank", "=1 or more, or -1 to fill the ranks"),
    (4, ["mesh.ep_shard=0"], "mesh.ep_shard", "at least 1 rank", "=1 or more, or -1 to fill the ranks"),
    (6, ["mesh.pp=4"], "mesh.dp_shard", "6 ranks do not divide by pp*dp_replicate*cp*tp = 4*1*1*1 = 4", "4 or 8"),
    (4, ["mesh.ep=3"], "mesh.ep", "1*4*1*1 = 4 must equal", "mesh.ep=2 mesh.ep_shard=2"),
    (4, ["mesh.ep=2", "mesh.ep_shard=4"], "mesh.ep", "1*4*2*1", "mesh.ep_shard=2"),
    (
        4,
        ["mesh.tp=4", "mesh.pp=1", "model.attention.num_heads=6", "model.attention.num_kv_heads=6"],
        "model.attention.num_heads",
        "mesh.tp=4 ranks hold equal numbers of attention heads: 4 does not divide 6 (6 % 4 = 2)",
        "model.attention.num_heads=4 or 8",
    ),
    (4, ["mesh.tp=4", "mesh.pp=1", "model.vocab_size=262"], "model.vocab_size", "262 % 4 = 2", "260 or 264"),
    (
        3,
        [
            "mesh.tp=3",
            "model=small_mixtral",
            "model.hidden_size=192",
            "model.moe_intermediate_size=96",
            "model.vocab_size=264",
            "model.attention.num_heads=12",
            "model.attention.num_kv_heads=2",
        ],
        "mesh.tp",
        "2 heads (model.attention.num_kv_heads)",
        "mesh.tp=1",
    ),
    (
        4,
        ["mesh.pp=1", "mesh.etp=2", "mesh.ep=2", "model.moe_intermediate_size=97"],
        "model.moe_intermediate_size",
        "97 % 2 = 1",
        "96 or 98",
    ),
    (
        4,
        ["mesh.pp=1", "mesh.tp=4", "mesh.dp_shard=1", "train.seq_len=66"],
        "train.seq_len",
        "cp*tp = 1*4 = 4 does not divide 66 (66 % 4 = 2)",
        "64 or 68",
    ),
    (
        4,
        ["mesh.ep=4", "model.num_experts=18", "model.router.num_groups=1", "model.router.topk_groups=1"],
        "model.num_experts",
        "18 % 4 = 2",
        "model.num_experts=16 or 20, or mesh.ep=2",
    ),
    (4, ["model.moe_intermediate_size=98"], "model.moe_intermediate_size", "98 % 4 = 2", "=96 or 100"),
    (4, ["kernels.attention=cudnn"], "kernels.attention", "cuDNN needs CUDA", "kernels.attention=sdpa"),
    (8, ["model.hidden_size=196"], "model.hidden_size", "196 % 8 = 4", "=192 or 200, or mesh.ep=2 mesh.ep_shard=4"),
    (
        4,
        ["train.global_batch_size=10"],
        "train.global_batch_size",
        "1*4*2 = 8 does not divide 10 (10 % 8 = 2)",
        "=8 or 16",
    ),
    (
        2,
        ["mesh.cp=2", "train.seq_len=250"],
        "train.seq_len",
        "2*cp = 2*2 = 4 does not divide 250 (250 % 4 = 2)",
        "=248 or 252",
    ),
    (
        2,
        ["mesh.pp=2", "train.global_batch_size=2"],
        "train.global_batch_size",
        "at least mesh.pp=2 micro-batches in flight; global_batch_size / "
        "(dp_replicate*dp_shard*micro_batch_size) = 2 / (1*1*2) = 1",
        "train.global_batch_size=4",
    ),
    (
        2,
        ["mesh.pp=2", "experiment=interleaved", "train.global_batch_size=6"],
        "train.global_batch_size",
        "3 % 2 = 1",
        "=4 or 8",
    ),
    (
        2,
        ["mesh.pp=2", "parallel.stages_per_rank=2"],
        "parallel.stages_per_rank",
        "1F1B runs exactly 1 stage",
        "Interleaved1F1B",
    ),
    (2, ["mesh.pp=2", "parallel.schedule=Interleaved1F1B"], "parallel.stages_per_rank", "at least 2 stages", "=2"),
    (
        1,
        ["parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2"],
        "parallel.stages_per_rank",
        "mesh.pp=1",
        "parallel.stages_per_rank=1",
    ),
    (2, ["mesh.pp=2", "parallel.schedule=1f1b"], "parallel.schedule", "must be one of GPipe", "schedule=1F1B"),
    (2, ["mesh.pp=2", "parallel.schedule=a.csv"], "parallel.schedule", "must be one of GPipe", "Nearest valid"),
    (
        2,
        [
            "mesh.pp=2",
            "parallel.schedule=ZBVZeroBubble",
            "parallel.stages_per_rank=2",
            "parallel.recompute=[moe,layernorm]",
        ],
        "parallel.recompute",
        "moe: the halves of a backward pass",
        r"recompute=[layernorm], or parallel.schedule=Interleaved1F1B",
    ),
    (
        2,
        ["model=small_dsv3", "mesh.pp=2", "parallel.schedule=ZBVZeroBubble", "parallel.stages_per_rank=2"]
        + ["model.num_mtp_layers=2"],
        "model.num_mtp_layers",
        "more than one depth",
        "model.num_mtp_layers=1",
    ),
    (
        2,
        ["mesh.pp=2", "parallel.schedule=DualPipeV", "parallel.stages_per_rank=2", "train.compile=true"],
        "train.compile",
        "halves of a compiled backward",
        "Interleaved1F1B",
    ),
    (
        4,
        ["mesh.pp=2", "mesh.ep=2", "parallel.schedule=ZBVZeroBubble", "parallel.stages_per_rank=2"]
        + ["parallel.overlap_all_to_all=true"],
        "parallel.schedule",
        "merges the passes of Interleaved1F1B and DualPipeV",
        "Interleaved1F1B",
    ),
    (8, ["mesh.pp=8"], "model.num_layers", "there are 8 stages", "model.num_layers to 8"),
    (
        2,
        ["mesh.pp=2", "parallel.layers_per_stage=[1,2]"],
        "parallel.layers_per_stage",
        "add up to 3, and model.num_layers is 4",
        "[2,2]",
    ),
    (
        2,
        ["mesh.pp=2", "parallel.reshard=micro_batch"],
        "parallel.reshard",
        "always wait for the end of the step",
        "parallel.reshard=step",
    ),
    (
        2,
        ["mesh.pp=2", "parallel.grad_sync=micro_batch"],
        "parallel.grad_sync",
        "always wait for the end of the step",
        "parallel.grad_sync=step",
    ),
    (1, ["model.router.num_groups=5"], "model.router.num_groups", "16 % 5 = 1", "model.router.num_groups=4"),
    (1, ["model.router.topk_groups=5"], "model.router.topk_groups", "only 4 groups", "=4 or less"),
    (
        1,
        ["model.router.topk_groups=1", "model.num_experts_per_token=6"],
        "model.router.topk_groups",
        "1 groups of 4 experts hold 4, fewer than model.num_experts_per_token=6",
        "model.router.topk_groups=2",
    ),
    (1, ["model.router.group_score_topk=5"], "model.router.group_score_topk", "a group has 4 experts", "=4 or less"),
    (
        1,
        ["model.num_experts_per_token=17"],
        "model.num_experts_per_token",
        "all 16 experts",
        "model.num_experts_per_token=16",
    ),
    (1, ["model.first_k_dense=5"], "model.first_k_dense", "there are 4 layers", "=4 or less"),
    (
        1,
        ["model.attention.kv_lora_rank=0"],
        "model.attention.kv_lora_rank",
        "attention kind mla needs",
        "kv_lora_rank=1",
    ),
    (1, ["model.attention.qk_rope_head_dim=15"], "model.attention.qk_rope_head_dim", "pairs of dimensions", "=14 or"),
    (
        1,
        ["model=small_mixtral", "model.attention.num_kv_heads=4"],
        "model.attention.num_kv_heads",
        "6 % 4 = 2",
        "model.attention.num_kv_heads=3",
    ),
    (
        1,
        ["model=small_glm4_moe", "model.rope.partial_rotary_factor=0.3"],
        "model.rope.partial_rotary_factor",
        "int(32 * 0.3) = 9",
        "model.rope.partial_rotary_factor=0.25",
    ),
    (
        1,
        ["model=small_glm4_moe", "model.rope.partial_rotary_factor=1.5"],
        "model.rope.partial_rotary_factor",
        "at most 1",
        "model.rope.partial_rotary_factor=1",
    ),
    (1, ["model.rope.partial_rotary_factor=0.5"], "model.rope.partial_rotary_factor", "kind gqa has it", "=1.0"),
    (1, ["model.attention.qkv_bias=true"], "model.attention.qkv_bias", "kind gqa has it", "qkv_bias=false"),
    (
        1,
        ["model=small_llama", "model.rope.scaling=llama3", "model.rope.high_freq_factor=1"],
        "model.rope.high_freq_factor",
        "low_freq_factor=1.0 and a larger",
        "model.rope.high_freq_factor=4.0",
    ),
    (
        2,
        ["model.num_shared_experts=1", "model.shared_intermediate_size=33", "mesh.tp=2"],
        "model.shared_intermediate_size",
        "columns of the shared experts: 2 does not divide 33 (33 % 2 = 1)",
        "model.shared_intermediate_size=32 or 34",
    ),
    (1, ["model.rope.attention_factor=0"], "model.rope.attention_factor", "larger than 0", "attention_factor=null"),
    (
        1,
        ["model=small_mixtral", "model.shared_expert_gate=true"],
        "model.shared_expert_gate",
        "model.num_shared_experts=0",
        "model.shared_expert_gate=false",
    ),
    (1, ["train.dtype=float64", "moe.experts=triton"], "moe.experts", "triton has no float64", "moe.experts=loop"),
    (
        1,
        ["model.hidden_act=relu2", "moe.experts=triton", "launch.device=cuda"],
        "moe.experts",
        "hidden_act=relu2",
        "moe.experts=grouped_mm",
    ),
    (1, ["model.logits_scaling=0"], "model.logits_scaling", "larger than 0", "Set model.logits_scaling=1.0"),
    (
        1,
        ["model=small_llama", "parallel.expert_wgrad=fused"],
        "parallel.expert_wgrad",
        "no layer has experts",
        "parallel.expert_wgrad=autograd",
    ),
    (
        1,
        ["lora.rank=4", "parallel.expert_wgrad=fused"],
        "parallel.expert_wgrad",
        "adapters are trained (lora.rank=4)",
        "parallel.expert_wgrad=autograd",
    ),
    (
        1,
        ["moe.experts=loop", "parallel.expert_wgrad=fused"],
        "parallel.expert_wgrad",
        "moe.experts=loop return gradients",
        "moe.experts=grouped_mm",
    ),
    (
        1,
        ["train.fp8=tensorwise", "parallel.expert_wgrad=fused"],
        "parallel.expert_wgrad",
        "products in 8 bits",
        "train.fp8=off",
    ),
    (
        2,
        ["mesh.pp=2", "parallel.schedule=DualPipeV", "parallel.stages_per_rank=2", "parallel.expert_wgrad=fused"],
        "parallel.expert_wgrad",
        "each compute the products (DualPipeV",
        "parallel.schedule=Interleaved1F1B",
    ),
    (
        1,
        ["parallel.grad_sync=micro_batch", "parallel.expert_wgrad=fused"],
        "parallel.expert_wgrad",
        "no sum to add to",
        "parallel.grad_sync=step",
    ),
    (
        1,
        ["parallel.expert_wgrad=delayed"],
        "parallel.expert_wgrad",
        "parallel.overlap_all_to_all=false",
        "parallel.expert_wgrad=fused",
    ),
    (
        1,
        ["train.dtype=bfloat16", "model.moe_intermediate_size=100"],
        "model.moe_intermediate_size",
        "100 * 2 bytes = 200",
        "=96 or 104, or moe.experts=loop",
    ),
    (1, ["model.vocab_size=200"], "model.vocab_size", "the tokenizer byte makes ids up to 257", "model.vocab_size=264"),
    (1, ["data=text"], "data.path", "data.kind=text reads files", "data.path=FILE"),
    (1, ["data=jsonl", "data.path=/nowhere/*.jsonl"], "data.path", "nothing there", "exists"),
    (1, ["data.tokenizer=none"], "data.tokenizer", "is text, which a tokenizer turns into ids", "data.tokenizer=byte"),
    (1, ["data.tokenizer=gpt2"], "data.tokenizer", "does not exist", "data.tokenizer=byte"),
    (1, ["data.val_fraction=0"], "data.val_fraction", "train.val_every=50 validates", "train.val_every=0"),
    (1, ["data.val_fraction=1.5"], "data.val_fraction", "[0, 1)", "0.02"),
    (
        1,
        ["model.router.expert_bias=false"],
        "model.router.expert_bias",
        "a deepseek_v3 checkpoint can only have True",
        "model.router.expert_bias=True",
    ),
    (1, ["recipe=no.such.recipe"], "recipe", "no such recipe", "Name one of "),
    (1, ["train.steps=0"], "train.steps", "at least 1", "train.steps=1"),
    (1, ["optim.lr=nan"], "optim.lr", "finite", "optim.lr=0.003"),
    (1, ["optim.betas=[0.9,1.0]"], "optim.betas", "beta 2 is 1.0", "[0.9,0.95]"),
    *(
        (1, [f"{key}={value}"], key, rule, remedy)
        for key, value, rule, remedy in (
            ("train.seed", "-1", "at least 0", "train.seed=0"),
            ("optim.lr", "inf", "finite", "optim.lr=0.003"),
            ("optim.eps", "0", "larger than 0", "optim.eps=1e-8"),
            ("model.norm_eps", "-1e-6", "at least 0", "model.norm_eps=0"),
            ("model.initializer_range", "0", "larger than 0", "0.02"),
            ("model.rope.theta", "0", "larger than 0", "model.rope.theta=10000"),
            ("model.rope.factor", "0", "larger than 0", "model.rope.factor=1"),
            ("model.rope.factor", "inf", "finite", "model.rope.factor=1"),
            ("model.rope.original_seq_len", "-1", "at least 1", "model.rope.original_seq_len=1"),
            ("data.max_bytes", "0", "at least 1", "data.max_bytes=1"),
            ("cluster.peak_flops", "-1", "at least 0", "cluster.peak_flops=0"),
            ("cluster.gemm_curve", "[0.5,1.5]", "each from 1e-6 to 1", "cluster.gemm_curve=[]"),
            ("cluster.gemm_curve_from", "0", "larger than 0", "cluster.gemm_curve_from=64"),
            ("cluster.inter_node_bandwidth", "-1", "at least 0", "cluster.inter_node_bandwidth=0"),
            ("cluster.gpus_per_node", "0", "at least 1", "cluster.gpus_per_node=1"),
        )
    ),
    (
        1,
        ["model.rope.scaling=yarn", "model.rope.theta=1"],
        "model.rope.theta",
        "must be larger than 1",
        "model.rope.theta=10000",
    ),
    (1, ["run_dir="], "run_dir", "names no directory", "run_dir to a directory"),
    (
        1,
        ["moe.record_routing=/dev/null/routing"],
        "moe.record_routing",
        "/dev/null is not a directory",
        "another moe.record_routing",
    ),
    (
        1,
        ["data.path=my.txt"],
        "data.path",
        "data.path is set and data.kind=stdlib does not read it",
        "data=text|jsonl|parquet",
    ),
    (4, ["mesh=pp2_ep2", "mesh.tp=4"], "mesh.dp_shard", "2*1*1*4 = 8", "to 8, or mesh.pp=1 or mesh.tp=2"),
    (1, ["checkpoint.keep=0"], "checkpoint.keep", "at least 1", "checkpoint.keep=1"),
]


@pytest.mark.parametrize(("ranks", "overrides", "key", "rule", "remedy"), BAD, ids=[" ".join(b[1]) for b in BAD])
def test_every_rule_names_key_numbers_and_the_nearest_choice(
    ranks: int, overrides: list[str], key: str, rule: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(ranks, *overrides)
    assert caught.value.key == key
    assert rule in caught.value.rule
    assert remedy in caught.value.remedy


MENDED = [
    (4, ["mesh.ep=4", "model.num_experts=20", "model.router.num_groups=1", "model.router.topk_groups=1"]),
    (4, ["model.moe_intermediate_size=100"]),
    (4, ["train.global_batch_size=8"]),
    (2, ["mesh.cp=2", "train.seq_len=252"]),
    (2, ["mesh.pp=2", "train.global_batch_size=4"]),
    (2, ["mesh.pp=2", "train.global_batch_size=2", "parallel.schedule=GPipe"]),
    (2, ["mesh.pp=2", "experiment=interleaved", "train.global_batch_size=8"]),
    (2, ["mesh.pp=2", "parallel.layers_per_stage=[3,1]"]),
    (2, ["parallel.reshard=micro_batch", "parallel.grad_sync=micro_batch"]),
    (1, ["model.router.topk_groups=2", "model.num_experts_per_token=6"]),
    (1, ["train.dtype=float64", "moe.experts=loop"]),
    (1, ["train.dtype=float64"]),
    (1, ["train.dtype=float64", "parallel.expert_wgrad=fused"]),
    (2, ["mesh.ep=2", "parallel.overlap_all_to_all=true", "parallel.expert_wgrad=delayed"]),
    (1, ["train.dtype=bfloat16", "model.moe_intermediate_size=104"]),
    (1, ["train.dtype=bfloat16", "model.moe_intermediate_size=100", "moe.experts=loop"]),
    (1, ["data.val_fraction=0", "train.val_every=0"]),
    (4, ["mesh=pp2_ep2", "mesh.tp=4", "mesh.pp=1"]),
    (4, ["mesh=pp2_ep2", "mesh.tp=2"]),
    (1, ["model.rope.theta=1"]),  # without YaRN every pair turns alike, which is odd and works
    (
        4,
        [
            "mesh.ep=4",
            "model.first_k_dense=4",
            "model.num_experts=6",
            "model.router.num_groups=1",
            "model.router.topk_groups=1",
            "checkpoint.export_hf=false",
        ],
    ),
    (1, ["model.router.expert_bias=false", "checkpoint.export_hf=false"]),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("ranks", "overrides"), MENDED, ids=[" ".join(m[1]) for m in MENDED])
def test_the_remedies_are_valid(ranks: int, overrides: list[str]) -> None:
    check(ranks, *overrides)


RING = ("mesh.cp=2", "parallel.context=ring")


def test_a_ring_keeps_documents_apart_on_the_cpu_alone() -> None:
    with pytest.raises(ConfigError, match="parallel.context=ring: ring attention on CUDA has no document mask"):
        check(2, *RING, device="cuda")
    check(2, *RING, "data.document_mask=false", device="cuda")
    check(2, *RING, device="cpu")
    check(1, "parallel.context=ring", device="cuda")  # without a context axis nothing is exchanged


def test_a_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    vocab = {f"t{i}": i for i in range(300)} | {"</s>": 300}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ConfigError) as caught:
        check(1, f"data.tokenizer={tmp_path}")
    assert caught.value.key == "model.vocab_size"
    assert "ids up to 300" in caught.value.rule and "ends at 263" in caught.value.rule
    assert "model.vocab_size=304" in caught.value.remedy
    check(1, f"data.tokenizer={tmp_path}", "model.vocab_size=304")


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.*file is not a directory"):
        check(1, f"run_dir={tmp_path}/file/run")
    check_writable(str(tmp_path / "a" / "b"))
    assert not (tmp_path / "a").exists(), "checking makes nothing"


def test_a_read_only_run_directory() -> None:
    # /proc refuses new directories to every user, root included, as a read-only disk does.
    with pytest.raises(ConfigError, match=r"run_dir=/proc/automoe: cannot be written"), locked(Path("/proc/automoe")):
        pass


@pytest.mark.parametrize(
    ("rampup", "more", "said"),
    [
        ("[8,8]", [], "has 2"),
        ("[8,5,100]", [], "grows by whole increments, at least one: 16 - 8 = 8"),
        ("[16,8,100]", [], "16 - 16 = 0"),
        ("[8,4,1]", [], "1 rows are too few for 2 increments"),
        ("[4,4,100]", ["mesh.pp=2"], "it has batches of 4 rows, and 1F1B needs at least"),
        ("[8,4,100]", ["train.micro_batch_size=4"], "it has batches of 12 rows, and every data-parallel rank"),
    ],
)
def test_a_batch_that_cannot_grow_is_refused(rampup: str, more: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(4 if more == ["mesh.pp=2"] else 2, f"train.rampup_batch_size={rampup}", *more)
    assert error.value.key == "train.rampup_batch_size" and said in str(error.value)


@pytest.mark.parametrize("name", ["tools", "messages", "continue_final_message"])
def test_what_the_trainer_gives_a_template_is_no_argument_of_it(name: str) -> None:
    data = DataConfig(
        kind="chat", path=__file__, on_long="error", chat=ChatConfig(template_args={name: "x", "effort": "low"})
    )
    with pytest.raises(ConfigError, match=rf"data\.chat\.template_args=.*the trainer gives {name} to the template"):
        validate(Config(data=data), 1)
