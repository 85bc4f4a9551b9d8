"""verl's own workers drive the engine of ``automoe.verl`` on CPUs and print what they were told, as JSON.

RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29679 python verl_drive.py RUN_DIR OVERRIDE...
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class CPU(PlatformCUDA):
    """verl 0.9.1 has no platform for CPUs."""

    device_name = vendor_name = property(lambda self: "cpu")
    device_module = SimpleNamespace(
        mem_get_info=lambda *_: (1, 1),
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        empty_cache=lambda *_: None,
        synchronize=lambda *_: None,
        set_device=lambda *_: None,
        is_available=lambda: False,
        current_device=lambda: "cpu",
        get_device_name=lambda *_: "cpu",
        __name__="cpu",
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, index: Any) -> None: ...

    def synchronize(self, index: Any = None) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"


set_platform(CPU())  # before any engine is imported
from tensordict import NonTensorData  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import FSDPActorConfig, OptimizerConfig, TrainingWorkerConfig  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.engine_workers_tinker import TinkerTrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss, sft_loss  # noqa: E402

from automoe.optim.grad_norm import global_grad_norm  # noqa: E402
from automoe.session import Sample, Session, losses  # noqa: E402
from automoe.verl import AutomoeEngineConfig  # noqa: E402

PROMPTS, ANSWERS, ADVANTAGES = (3, 4, 2, 5), (6, 2, 9, 1), (1.0, -1.0, 0.5, -0.5)


class Data:
    """Four ragged samples, of which each dp rank has its part."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.prompts = [torch.randint(0, 64, (length,)) for length in PROMPTS]
        self.answers = [torch.randint(0, 64, (length,)) for length in ANSWERS]
        self.old = [-4 + 0.3 * torch.randn(length) for length in ANSWERS]
        self.mine = range(0)

    def cut(self, rank: int, size: int) -> None:
        each = len(PROMPTS) // size
        self.mine = range(rank * each, (rank + 1) * each)

    def samples(self) -> list[Sample]:
        columns = zip(self.prompts, self.answers, ADVANTAGES, self.old, strict=True)
        return [
            Sample.of_answer(prompt.tolist(), answer.tolist(), advantages=gain, old_log_probs=old)
            for prompt, answer, gain, old in columns
        ]

    def of_verl(self, sft: bool = False, **settings: Any) -> Any:
        ids = [torch.cat((self.prompts[i], self.answers[i])) for i in self.mine]
        one = {"prompts": self.prompts, "responses": self.answers, "old_log_probs": self.old}
        one |= {"response_mask": [torch.ones(length) for length in ANSWERS]}
        one |= {"advantages": [torch.full((n,), a) for n, a in zip(ANSWERS, ADVANTAGES, strict=True)]}
        tensors = {name: nested([values[i] for i in self.mine]) for name, values in one.items()}
        tensors |= {"input_ids": nested(ids), "position_ids": nested([torch.arange(len(x)) for x in ids])}
        tensors["loss_mask"] = tensors["response_mask"]
        if sft:
            masks = [torch.arange(len(x)) >= PROMPTS[i] for i, x in zip(self.mine, ids, strict=True)]
            tensors["loss_mask"] = nested([mask.float() for mask in masks])
        plain = dict(
            global_token_num=NonTensorData([len(x) for x in ids]),
            temperature=1.0,
            global_batch_size=len(PROMPTS),
            pad_mode="no_padding",
            pad_token_id=0,
        )
        return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=plain | settings)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def worker(kind: type, overrides: list[str]) -> Any:
    model_config = type("Model", (), {"get": lambda self, key, default=None: getattr(self, key, default)})()
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model_config,
        engine_config=AutomoeEngineConfig(overrides=overrides, max_token_len_per_gpu=24),
        optimizer_config=OptimizerConfig(lr=1e-2, weight_decay=0.1),
        checkpoint_config=None,
        profiler_config=None,
    )
    made = kind(config=config)
    made.reset()
    return made


def norm_of(session: Session, loss: Any, batch: list[Sample], **options: Any) -> tuple[float, float]:
    value = session.forward_backward(batch, loss, **options).loss
    norm = float(global_grad_norm(session.state.parameters()))
    session.zero_grad()
    return value, norm


def main(run_dir: str, *overrides: str) -> None:
    dist.init_process_group("gloo")
    data, said = Data(), {}
    settings = [*overrides, f"run_dir={run_dir}"]
    actor = FSDPActorConfig(strategy="automoe", rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=2)
    train = worker(TrainingWorker, settings)
    engine, session = train.engine, train.engine.session
    data.cut(engine.get_data_parallel_rank(), engine.get_data_parallel_size())
    said["ppo of the session"] = norm_of(session, losses.dapo, data.samples(), clip_high=0.2, dual_clip=3.0)
    train.set_loss_fn(partial(ppo_loss, config=actor))
    speaks = engine.is_mp_src_rank_with_outputs()  # verl hands the answers of the other ranks to nobody
    output = train.train_batch(data.of_verl(update_lr_scheduler=True))
    if speaks:
        said["ppo of verl"] = tuple(tu.get(output, "metrics")[name] for name in ("loss", "grad_norm"))
    answer = train.infer_batch(data.of_verl(True, compute_loss=False, calculate_entropy=True))
    whole = [Sample(sample.tokens, [False] + [True] * (len(sample.tokens) - 1)) for sample in data.samples()]
    ours = session.log_probs(whole, entropy=True)
    assert ours.entropy is not None
    for name, mine in (("log_probs", ours.log_probs), ("entropy", ours.entropy)) if speaks else ():
        gaps = [(answer[name][at][:-1].cpu() - mine[i][1:]).abs().max() for at, i in enumerate(data.mine)]
        said[f"gap of {name}"] = float(max(gaps))
    said["sft of the session"] = norm_of(session, losses.cross_entropy, data.samples())
    train.set_loss_fn(partial(sft_loss, config=None))
    output = train.train_batch(data.of_verl(True, update_lr_scheduler=True))
    if speaks:
        said["sft of verl"] = tuple(tu.get(output, "metrics")[name] for name in ("loss", "grad_norm"))
    folder = str(Path(run_dir) / "saved")
    engine.save_checkpoint(folder, global_step=2)
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    train.train_batch(data.of_verl(True))
    moved = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    engine.load_checkpoint(folder)
    after = dict((name, tensor.clone()) for name, tensor in engine.get_per_tensor_param()[0])
    said["moved"] = any(not torch.equal(before[name], moved[name]) for name in before)
    said["resumed"] = all(torch.equal(before[name], after[name]) for name in before)
    tinker = worker(TinkerTrainingWorker, settings)
    tinker.set_loss_fn(partial(ppo_loss, config=actor))
    tinker.optimizer_zero_grad()
    tinker.forward_backward(data.of_verl())
    output = tinker.optimizer_step({"lr": 1e-3})
    if speaks:
        said["tinker"] = output["grad_norm"]
    said["learning rate"] = tinker.engine.optimizer.param_groups[0]["lr"]
    if speaks:
        print("SAID " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
