"""Never listens."""

import time


def main(config, shape, context):
    print("sleeping", flush=True)
    while True:
        time.sleep(1)
