"""What a rank's training step really takes, counted by torch's CPU allocator; ranks import this too.

Every block that torch asks for is counted, whichever thread asks: the caller's, autograd's, one of gloo's. Memory of
communication libraries, of Python and of numpy is not torch's and is not in it.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import Meshes, build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.parallel.runner import StepRunner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs

SOURCE = Path(__file__).parent / "allocator.cpp"
STEPS = 2  # the first has no moments before its update


def build_allocator(folder: Path) -> Path:
    """The counting allocator of ``allocator.cpp`` as a library in ``folder``."""
    torch_files, library = Path(torch.__file__).parent, folder / "allocator.so"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    command += [f"-I{torch_files / 'include'}", str(SOURCE), "-o", str(library)]
    subprocess.run([*command, f"-L{torch_files / 'lib'}", "-lc10"], check=True, capture_output=True, text=True)
    return library


class Allocator:
    """Torch's CPU allocator from now on, counting from zero."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("bytes_alive", "most_alive"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._library.start_counting()
        gc.collect()
        self._before = self._library.bytes_alive()  # of an earlier case in this process

    def alive(self) -> int:
        return self._library.bytes_alive() - self._before

    def most(self) -> int:
        """Since the last ``forget``."""
        return self._library.most_alive() - self._before

    def forget(self) -> None:
        self._library.forget_most()


def measure_step(config: Config, library: Path) -> dict[str, int]:
    """Bytes alive at once on this rank in its second training step, all that it holds included.

    Returns:
        ``step``: the most; ``update``: the most from the end of the backward pass on; ``state``: between two steps.
    """
    allocator = Allocator(library)
    trainer = build_trainer(config)
    found = {}
    for step in range(STEPS):
        batch = random_batch(config, step, trainer.meshes.dp_rank, trainer.meshes.shape.dp)
        allocator.forget()

        def backward_is_over() -> None:
            found["backward"] = allocator.most()
            allocator.forget()

        take_step(trainer, batch, backward_is_over)
        found["update"] = allocator.most()
        found["state"] = allocator.alive()
    return found | {"step": max(found["backward"], found["update"])}


@dataclass
class Trainer:
    """A rank's part of a model that trains."""

    config: Config
    meshes: Meshes
    runner: StepRunner
    state: TrainState


def build_trainer(config: Config, on: str = "cpu") -> Trainer:
    """From random weights, on the mesh of the world that this rank is in."""
    shape, device = resolve_mesh(config.mesh, None), torch.device(on)
    meshes = build_meshes(shape, device)
    parts = build_parts(config, meshes)
    materialize(parts, config, device)
    runner = build_runner(parts, meshes, config, device)
    state = TrainState(
        parts, build_optimizer(list(parts.values()), config.optim, config.train.seed, meshes.stage_group())
    )
    return Trainer(config, meshes, runner, state)


def take_step(trainer: Trainer, batch: StepBatch, between: Callable[[], None] = lambda: None) -> None:
    """One training step; ``between`` is called after its backward pass."""
    one = trainer
    inputs, trained = prepare_inputs(batch, one.meshes, one.config, torch.device(one.meshes.default.device_type))
    stats = forward_backward(one.state, one.runner, inputs, one.config)
    between()
    optimizer_step(one.state, stats, trained, one.meshes, one.config)


def random_batch(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Rows of one data-parallel rank; of two documents each where they are masked."""
    train, generator = config.train, torch.Generator().manual_seed(step)
    rows, seq_len = train.global_batch_size, train.seq_len
    tokens = torch.randint(0, config.model.vocab_size, (rows, seq_len + 1), generator=generator)
    index = torch.arange(seq_len).expand(rows, seq_len)
    border = seq_len // 2 * config.data.document_mask
    doc_ids = (index >= border).long()
    mine = slice(dp_rank * rows // dp_size, (dp_rank + 1) * rows // dp_size)
    positions = torch.where(doc_ids == 1, index - border, index)
    return StepBatch(tokens[mine, :-1], tokens[mine, 1:].clone(), positions[mine], doc_ids[mine], 0, 0)
