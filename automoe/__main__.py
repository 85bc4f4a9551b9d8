import sys

try:
    from automoe.cli import main

    status = main()
except KeyboardInterrupt:  # before there is anything that could catch it
    status = 130
sys.exit(status)
