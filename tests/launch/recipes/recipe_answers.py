"""Ends at once with an objective that every rank took part in."""

import torch
import torch.distributed as dist


def main(config, shape, context):
    total = torch.tensor(float(context.rank + 1))
    dist.all_reduce(total)
    print(f"hello from rank {context.rank} of {context.world_size}")
    return total.item() * config.train.steps
