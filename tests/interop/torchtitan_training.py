"""A script: torchtitan's own ``Trainer`` on the CPU, on weights and rows that are given. It needs torch 2.14.

    python torchtitan_training.py FOLDER

FOLDER/first is a small HuggingFace Llama, FOLDER/rows.pt its steps (``tokens`` and ``labels``, [steps, rows, seq_len])
and numbers of AdamW. Writes FOLDER/torchtitan.json, loss and gradient norm of each step, and FOLDER/torchtitan.pt, the
weights at the end under their HuggingFace names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.tools import utils

# Read when its other modules are imported; a CUDA build of torch without a GPU is taken for one with a GPU.
utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.tools.utils import NoColor  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

FOLDER = Path(sys.argv[1])
GIVEN = torch.load(FOLDER / "rows.pt", weights_only=True)


class Rows(BaseDataLoader):
    """The rows of the file, a step at a time."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **unused: Any) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for tokens, labels in zip(GIVEN["tokens"], GIVEN["labels"], strict=True):
            yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Rows are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **unused: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode  # type: ignore[assignment]


class Recorded(MetricsProcessor):
    """Keeps what torchtitan logs; its own asks the device for its memory, which a CPU does not tell."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **unused: Any) -> None:
        no_memory = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: no_memory)
        self.color, self.data_loading_times, self.ntokens_since_last_log = NoColor(), [], 0
        self.steps: list[dict[str, float]] = []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, max_loss: float, grad_norm: float, extra_metrics: Any = None) -> None:
        self.steps.append({"loss": loss, "grad_norm": grad_norm})

    def close(self) -> None:
        pass


def llama(hf: LlamaConfig) -> llama3.Llama3Model.Config:
    """torchtitan's description of the model that a HuggingFace configuration describes."""
    size, vocabulary, eps = hf.hidden_size, hf.vocab_size, hf.rms_norm_eps
    given = {"weight": torch.nn.init.zeros_}  # all weights are loaded
    head_dim = hf.hidden_size // hf.num_attention_heads
    layers = llama3._build_llama3_layers(
        n_layers=hf.num_hidden_layers,
        dim=size,
        n_heads=hf.num_attention_heads,
        n_kv_heads=hf.num_key_value_heads,
        hidden_dim=hf.intermediate_size,
        rope=ComplexRoPE.Config(
            dim=head_dim, max_seq_len=hf.max_position_embeddings, theta=hf.rope_parameters["rope_theta"]
        ),
        fuse_qkv=False,
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = eps
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward here
    return llama3.Llama3Model.Config(
        dim=size,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=size, param_init=given),
        norm=RMSNorm.Config(normalized_shape=size, eps=eps, param_init=given),
        lm_head=Linear.Config(in_features=size, out_features=vocabulary, param_init=given),
        layers=layers,
    )


def main() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    steps, rows, seq_len = GIVEN["tokens"].shape
    hf = AutoModelForCausalLM.from_pretrained(FOLDER / "first", dtype=torch.float32)
    spec = ModelSpec(
        name="llama3",
        flavor="small",
        model=llama(hf.config),
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=llama3.Llama3StateDictAdapter,
    )
    trainer = Trainer.Config(
        model_spec=spec,
        dump_folder=str(FOLDER / "torchtitan"),
        loss=CrossEntropyLoss.Config(global_vocab_size=hf.config.vocab_size),
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(),
        optimizer=default_adamw(**GIVEN["adamw"]),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=rows,
            seq_len=seq_len,
            steps=steps,
            max_norm=GIVEN["grad_clip"],
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        metrics=Recorded.Config(log_freq=1),
    ).build()
    [part] = trainer.model_parts
    adapter = llama3.Llama3StateDictAdapter(trainer.model_config, None)
    weights = adapter.from_hf(dict(hf.state_dict()))
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.to_local().copy_(weights.pop(name))
    assert not weights, sorted(weights)
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, steps + 1):  # its own loop asks the device for its number after the first step
        trainer.train_step(batches)
    last = {name: p.full_tensor().detach() for name, p in part.named_parameters()}
    (FOLDER / "torchtitan.json").write_text(json.dumps(trainer.metrics_processor.steps))
    torch.save({name: tensor.clone() for name, tensor in adapter.to_hf(last).items()}, FOLDER / "torchtitan.pt")


if __name__ == "__main__":
    main()
