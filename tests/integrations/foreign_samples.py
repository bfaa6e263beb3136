"""A sample for other trainers' formats, and what is read from a file of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import penstock as ps
from penstock.integrations.formats.file_formats import convert_files

COLUMNS: dict[str, Any] = {
    "loss_mask": [0, 0, 1, 0, 1],
    "logprobs": [0, 0, -0.5, 0, -0.25],
    "rewards": 1.0,
    "advantages": 0.5,
}
SAMPLE = ps.Sample(id="g/0", group="g", env="math", token_ids=[1, 2, 3, 4, 5], policy_version=3, **COLUMNS)


def samples_of(path: Path, **how: Any) -> list[ps.Sample]:
    convert_files([str(path)], str(path) + ".penstock", **how)
    return list(ps.decode(Path(f"{path}.penstock").read_bytes()))
