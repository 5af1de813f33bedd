"""Benchmarks: seeded, and told as ratios against a named reference that is measured in the same run."""

import sys
from pathlib import Path

# The engine driver is the end-to-end tests' own.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
