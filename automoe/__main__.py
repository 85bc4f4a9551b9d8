import sys

try:
    from automoe.cli import main

    status = main()
except KeyboardInterrupt:  # Ctrl-C came before `exit_status` was installed
    status = 130
sys.exit(status)
