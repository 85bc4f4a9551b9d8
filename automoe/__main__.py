import sys

from automoe.cli import main

sys.exit(main())
