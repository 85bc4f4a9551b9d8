"""Rank 1 falls asleep in layer 3 while rank 0 waits for it there: in a collective, or (train.seed=1) in a receive."""

import time

import torch
import torch.distributed as dist


class Layer(torch.nn.Module):
    def __init__(self, sleeps, receives):
        super().__init__()
        self.sleeps, self.receives = sleeps, receives

    def forward(self, x):
        if self.sleeps:
            time.sleep(3600)
        y = torch.empty_like(x)
        if self.receives:
            dist.recv(y, 1) if dist.get_rank() == 0 else dist.send(x, 0)
        else:
            dist.all_to_all_single(y, x)
        return y


def main(config, shape, context):
    kinds = [(context.rank == 1 and number == 3, config.train.seed == 1) for number in range(4)]
    model = torch.nn.Sequential(*[Layer(*kind) for kind in kinds])
    model(torch.ones(2))
