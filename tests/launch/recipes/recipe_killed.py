"""Rank 1 vanishes without a word, as the kernel's out-of-memory killer does it."""

import os
import signal

import torch
import torch.distributed as dist


def main(config, shape, context):
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
