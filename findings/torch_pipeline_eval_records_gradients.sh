#!/usr/bin/env bash
# A validation by schedule.eval() of a pipeline keeps the autograd graph of every micro-batch until the next step.
#
# guess: eval() of a torch pipeline schedule runs without gradients, so that a validation needs less memory than a step.
# behaviour: It skips the backward passes alone. Every stage records the graph of each micro-batch and keeps its outputs
#   until the next call; 1F1B training holds as many micro-batches as there are stages, eval() all of them.
# versions: torch 2.13.0; two processes over gloo
# seen (2026-12-01): in eval(): 8 of 8 micro-batches recorded a graph, and 8 outputs with their graphs are kept
#   in a step of 1F1B: at most 2 at a time on the first of two stages
#   in eval() under no_grad: 0 of 8 recorded, 8 outputs kept
# consequence: A run that trains runs out of memory at its first validation, the later the more micro-batches it has.
# automoe: evaluates stages under no_grad and clears what they keep
#   (tests/rl/test_session_errors.py::test_stages_that_score_keep_nothing).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet 'torch==2.13.0' 'numpy==2.4.6'
cat > check.py <<'PY'
import socket
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

COUNT = 8


def measure(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=COUNT, loss_fn=nn.functional.mse_loss)
    recorded, held = [], []

    def look(module, args, out):
        recorded.append(out.requires_grad)
        held.append(len(stage.fwd_cache) + 1)

    part.register_forward_hook(look)
    x, y = torch.randn(16, 64), torch.randn(16, 64)

    def run(method, context):
        recorded.clear()
        held.clear()
        with context:
            getattr(schedule, method)(*[x] * (rank == 0), target=y if rank else None, losses=[])
        outputs = [out for outs, _ in stage.fwd_cache.values() for out in outs]
        # the first call also runs the part once, to learn the shapes
        return sum(recorded[-COUNT:]), max(held), len(outputs), sum(out.requires_grad for out in outputs)

    run("step", nullcontext())
    _, most, *_ = run("step", nullcontext())
    graphs, _, kept, with_graph = run("eval", nullcontext())
    quiet, _, kept_quietly, _ = run("eval", torch.no_grad())
    if rank == 0:
        print(f"in eval(): {graphs} of {COUNT} micro-batches recorded a graph, and {with_graph} outputs with their graphs are kept")
        print(f"in a step of 1F1B: at most {most} at a time on the first of two stages")
        print(f"in eval() under no_grad: {quiet} of {COUNT} recorded, {kept_quietly} outputs kept")
        assert (graphs, with_graph, most, quiet, kept_quietly) == (COUNT, COUNT, 2, 0, COUNT)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    mp.spawn(measure, (free,), 2)
PY
OMP_NUM_THREADS=1 venv/bin/python -W ignore check.py
