"""The clock jumps by an hour, and rank 1 comes late to what checkpoints talk over."""

import time

from automoe.comm.agreement import Ranks


def main(config, shape, context):
    true_time = time.time
    time.time = lambda: true_time() + 3600
    ranks = Ranks(timeout_s=1800)
    return ranks.all(lambda: time.sleep(context.rank * 1.2 * config.launch.timeout_s) or 1.0)[1]
