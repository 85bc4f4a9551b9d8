"""Ends well, but in another directory than the one it began in."""

import shutil
import time


def main(config, shape, context):
    if context.rank == 0:
        shutil.rmtree(context.run_dir)
        context.run_dir.mkdir()
    context.any_rank_stops()
    time.sleep(0.5)
