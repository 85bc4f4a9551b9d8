"""Imported first by scripts for machines where automoe is not installed: they measure the checkout that they lie in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
