"""Every rank stops the process that forked it, and ends."""

import os
import signal


def main(config, shape, context):
    os.kill(os.getppid(), signal.SIGSTOP)
    return 1.5
