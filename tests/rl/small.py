"""Overrides of a small model for sessions on CPUs."""

SMALL = [
    *("model=small_qwen3_moe", "mesh.pp=1", "mesh.ep=1"),
    *(f"model.{setting}" for setting in ("hidden_size=32", "num_layers=2", "num_experts=4", "vocab_size=64")),
    *(
        f"model.{setting}"
        for setting in ("num_experts_per_token=2", "moe_intermediate_size=16", "attention.head_dim=8")
    ),
    *("model.attention.num_heads=4", "data=benchmark", "data.tokenizer=null"),
    *("train.seq_len=32", "train.global_batch_size=4", "train.micro_batch_size=2", "train.dtype=float32"),
    *("optim.weight_decay=0.1", "moe.bias_update_rate=0.1", "moe.global_balance_coef=0.1"),
]
