"""Every rank raises where no file can grow, so that none can say why."""

import resource


def main(config, shape, context):
    context.any_rank_stops()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    raise ValueError("the seventh seal is broken")
