"""Tests with packages that do not fit the test environment: `make test-integrations` makes one and runs this folder.

Plain `pytest` does not collect it (tests/conftest.py). The wheels that `scripts/setup_integrations` unpacked are beside
the environment that runs this.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(sys.prefix).parent
for name in ("nemo-gym", "verl"):
    assert (FOLDER / name).is_dir(), f"{FOLDER / name} is missing; run `make test-integrations`"
    sys.path.append(str(FOLDER / name))
