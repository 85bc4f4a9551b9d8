"""verl's SFTTrainer over the engine of ``automoe.verl`` on CPUs; with a last step, killed after that step's checkpoint.

RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29679 python verl_sft.py FOLDER KILLED_AFTER OVERRIDE...
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl_drive import nested  # sets verl's platform, before any engine is imported

# isort: split
from omegaconf import OmegaConf
from verl.trainer.config import CheckpointConfig
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import OptimizerConfig

from automoe.errors import CheckpointError, ConfigError
from automoe.session import Sample, losses, open_session
from automoe.verl import AutomoeEngineConfig

EPOCHS, STEPS, BATCH = 3, 3, 4


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(STEPS * BATCH):
        ids = torch.randint(0, 64, (5 + number,), generator=generator)
        places = torch.arange(len(ids))
        made.append({"input_ids": ids, "position_ids": places, "loss_mask": (places >= 2).float()})
    return made


class Trainer(SFTTrainer):
    """verl's, with data and settings of ours."""

    overrides: list[str] = []
    killed_after = 0

    def _build_config(self) -> None:
        self.model_config: Any = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=0))
        self.model_config.get = lambda key, default=None: getattr(self.model_config, key, default)
        self.engine_config = AutomoeEngineConfig(overrides=self.overrides, max_token_len_per_gpu=64)
        self.optimizer_config = OptimizerConfig(lr=1e-2, weight_decay=0.1, lr_warmup_steps_ratio=0.5)
        self.checkpoint_config = CheckpointConfig()
        self.profiler_config = None
        self.start_profile_step = self.end_profile_step = -1

    def _build_dataset(self) -> None:
        self.train_dataset, self.val_dataset = rows(), None

    def _build_ckpt_handler(self) -> None:
        super()._build_ckpt_handler()
        save = self.ckpt_handler.save_checkpoint

        def save_and_die(step: int) -> None:
            save(step)
            if step == self.killed_after:
                os.kill(os.getpid(), signal.SIGKILL)

        self.ckpt_handler.save_checkpoint = save_and_die


def settings(folder: str) -> Any:
    trainer = dict(
        device="cpu",
        default_local_dir=f"{folder}/saved",
        default_hdfs_dir=None,
        resume_mode="auto",
        resume_from_path=None,
        max_ckpt_to_keep=2,
        total_epochs=EPOCHS,
        total_training_steps=None,
        save_freq=1,
        test_freq=-1,
        project_name="sft",
        experiment_name="small",
        logger=["file"],
    )
    data = dict(
        train_batch_size=BATCH,
        num_workers=0,
        pad_mode=DatasetPadMode.NO_PADDING,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=64,
        micro_batch_size_per_gpu=4,
    )
    return OmegaConf.create({"trainer": trainer, "data": data, "model": {"use_remove_padding": True}})


def refusals(trainer: Trainer) -> list[str]:
    """What the engine says of settings that it does not follow."""
    parts = dict(
        model_config=trainer.model_config,
        engine_config=trainer.engine_config,
        optimizer_config=trainer.optimizer_config,
        checkpoint_config=trainer.checkpoint_config,
    )
    wrong = (
        {"checkpoint_config": CheckpointConfig(save_contents=["model", "hf_model"])},
        {"checkpoint_config": CheckpointConfig(async_save=True)},
        {"checkpoint_config": CheckpointConfig(save_lora_only=True)},
        {"engine_config": AutomoeEngineConfig(overrides=trainer.overrides, optimizer_offload=True)},
        {"optimizer_config": SimpleNamespace(lr_scheduler_type="cosine")},
    )
    calls = [partial(type(trainer.engine), **(parts | change)) for change in wrong]
    calls += [partial(trainer.engine.to, "cuda", True), partial(trainer.engine.load_checkpoint, f"{os.getcwd()}/none")]
    messages = []
    for call in calls:
        try:
            call()
        except (ConfigError, CheckpointError) as error:
            messages.append(str(error))
    trainer.engine.to("cpu")
    return messages


def by_session(overrides: list[str], steps: list[int]) -> list[float]:
    """Losses of the same steps by a session; a step's samples are those of every dp rank's sampler."""
    session = open_session(overrides)
    said, data = [], rows()
    for step in steps:
        epoch, at = divmod(step, STEPS)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        places = order[at * BATCH : (at + 1) * BATCH]
        batch = [Sample(data[n]["input_ids"], data[n]["loss_mask"].bool()) for n in places]
        said.append(session.forward_backward(batch, losses.cross_entropy).loss)
        # half of the nine steps warm up
        session.optim_step(1e-2 * min(1, (step + 1) / 4))
    return said


def main(folder: str, killed_after: str, *overrides: str) -> None:
    dist.init_process_group("gloo")
    Trainer.overrides, Trainer.killed_after = [*overrides, f"run_dir={folder}"], int(killed_after)
    os.environ["VERL_FILE_LOGGER_ROOT"] = folder
    trainer = Trainer(settings(folder))
    losses_of_steps, train_batch = [], trainer.training_client.train_batch

    def noted(data: Any) -> Any:
        output = train_batch(data=data)
        if output is not None:
            losses_of_steps.append(tu.get(output, "metrics")["loss"])
        return output

    trainer.training_client.train_batch = noted
    first = trainer.resume_global_step
    trainer.fit()
    hashed = hashlib.sha256()
    for name, tensor in trainer.engine.get_per_tensor_param()[0]:
        hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
    said = {"first": first, "losses": losses_of_steps, "weights": hashed.hexdigest()}
    said["folders"] = sorted(name for name in os.listdir(f"{folder}/saved") if name.startswith("global_step"))
    if not int(killed_after) and not first:
        said["refused"] = refusals(trainer)
        said["of the session"] = by_session(
            [*Trainer.overrides, "optim.betas=[0.9,0.999]"], list(range(EPOCHS * STEPS))
        )
    if trainer.engine.is_mp_src_rank_with_outputs():
        print("SAID " + json.dumps(said), flush=True)


if __name__ == "__main__":
    assert nested is not None
    main(*sys.argv[1:])
