"""Penstock against its rivals on this machine: `penstock bench NAME` runs these from a clone."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""Where `python -m benchmarks.NAME` must be started: another installed package may have the same name."""
