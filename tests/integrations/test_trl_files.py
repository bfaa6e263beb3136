"""TRL's rollout samples as JSON lines, with the class of the package: what TRL would train differently is left out."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import penstock as ps
from penstock.integrations.formats.file_formats import convert_files, read_samples
from penstock.integrations.formats.shared import Lost

pytestmark = pytest.mark.deep

COLUMNS: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "loss_mask": [0, 1, 1],
    "logprobs": [0, -0.5, -0.25],
    "advantages": 1.0,
}


def test_lines_with_rewards_of_nan_are_read(tmp_path: Path) -> None:
    """Python's json writes NaN, which TRL has for completions that no reward function scored."""
    record = RolloutSample(
        prompt=[],
        completion=[],
        input_ids=[5, 6, 7],
        completion_mask=[0, 1, 1],
        old_log_probs=[0.0, -0.5, -0.25],
        advantage=0.5,
        model_version=3,
        group_id=7,
        metrics={"reward": math.nan, "tools/calls": math.nan, "length": 2.0},
    )
    scored = asdict(record) | {"metrics": {"reward": 1.0}}
    path = tmp_path / "rollouts.trl.jsonl"
    path.write_text(json.dumps(asdict(record)) + "\n" + json.dumps(scored) + "\n")
    assert "NaN" in path.read_text()
    first, second = read_samples(str(path), Lost())
    assert "rewards" not in first and float(second["rewards"]) == 1.0
    assert first.token_ids.tolist() == [5, 6, 7]


def test_samples_that_trl_would_train_differently_are_left_out_and_counted(tmp_path: Path) -> None:
    samples = [
        ps.Sample(id="plain", **COLUMNS),
        ps.Sample(id="ones", rl_weights=np.ones(3), **COLUMNS),
        ps.Sample(id="half", rl_weights=np.full(3, 0.5), **COLUMNS),
        ps.Sample(id="zero", rl_weights=[1, 0, 1], **COLUMNS),
        ps.Sample(id="ce", ce_weights=[0, 1, 0], **COLUMNS),
        ps.Sample(id="sft", mode="sft", **COLUMNS),
    ]
    (tmp_path / "in.penstock").write_bytes(ps.encode(samples))
    done = convert_files([f"{tmp_path}/in.penstock"], f"{tmp_path}/out.trl.jsonl")
    assert done.written == 2 and len((tmp_path / "out.trl.jsonl").read_text().splitlines()) == 2
    assert done.lost.left_out == {"rl_weights other than 1": 2, "ce_weights other than 0": 1, "mode sft": 1}
