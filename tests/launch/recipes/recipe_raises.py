"""Rank 1 raises before a collective that rank 0 has entered."""

import torch
import torch.distributed as dist


def main(config, shape, context):
    if context.rank == 1:
        raise ValueError("the seventh seal is broken")
    dist.all_reduce(torch.ones(1))
