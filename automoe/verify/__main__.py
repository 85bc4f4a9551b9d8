import sys

from automoe.verify import main

sys.exit(main())
