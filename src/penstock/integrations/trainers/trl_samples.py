"""Convert TRL's rollout samples, the input of its asynchronous GRPO trainer, in memory and as JSON lines.

TRL keeps them in a queue and has no file format. A line here is `dataclasses.asdict` of a `RolloutSample`. It has one
advantage per sample, needs log-probabilities, and trains every completion token by policy gradient with weight 1.
Samples that ask for anything else cannot be written. A reward of NaN, which TRL gives to completions that were not
scored, is read as none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.arrays import WEIGHTS, RolloutInfo, Sample, check_metrics, read_rollout
from penstock.capture import field_of, located, number_of, optional_mapping, required
from penstock.errors import InvalidInput
from penstock.extras import require
from penstock.integrations.formats.file_or_stream import Lost, Place, json_lines
from penstock.integrations.formats.responses import one_number

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

HELD = ("token_ids", "loss_mask", "logprobs", "advantages", "rewards", "group", "policy_version")
_READ = ("input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id", "metrics")


def from_trl(record: Any, *, id: str | None = None, lost: Lost | None = None) -> Sample:  # noqa: A002 - the field's own
    """Convert a `RolloutSample`, or a mapping of its fields. The metric `reward` becomes the sample's reward.

    >>> record = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "old_log_probs": [0.0, -0.5, -0.25]}
    >>> sample = from_trl(record | {"advantage": 0.5, "model_version": 3, "group_id": 7, "metrics": {"reward": 1.0}})
    >>> sample.group, sample.policy_version, float(sample["advantages"]), float(sample["rewards"])
    ('7', 3, 0.5, 1.0)
    """
    where = f"rollout sample {id!r}" if id else "rollout sample"
    metrics = dict(optional_mapping(record, "metrics", where))
    reward = None if metrics.get("reward") is None else number_of(metrics, "reward", f"{where}.metrics")
    metrics.pop("reward", None)
    reward = None if reward is None or reward != reward else reward
    if lost is not None:
        fields = asdict(record) if is_dataclass(record) and not isinstance(record, type) else dict(record)
        lost.fields(fields, known=_READ)
    group, version = field_of(record, "group_id"), field_of(record, "model_version")
    return Sample(
        id=id,
        group="" if group is None else str(group),
        policy_version=None if version == -1 else version,
        token_ids=required(record, "input_ids", where),
        loss_mask=required(record, "completion_mask", where),
        logprobs=required(record, "old_log_probs", where),
        advantages=number_of(record, "advantage", where),
        rewards=reward,
        rollout=RolloutInfo(metrics=check_metrics(metrics, f"{where}.metrics")),
    )


def to_trl(sample: Sample, *, group_id: int) -> RolloutSample:
    """Convert a sample to a `RolloutSample` for the queue of TRL's trainer. Needs trl."""
    require("to_trl", "trl")
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return RolloutSample(**rollout_fields(sample, group_id))


def rollout_fields(sample: Sample, group_id: int) -> dict[str, Any]:
    """Return the fields of a `RolloutSample`, by name. An unknown version is -1, an unknown metric NaN, as in TRL."""
    advantage = one_number(sample, "advantages")
    if advantage is None or "logprobs" not in sample:
        raise InvalidInput(
            f"sample {sample.id!r}: TRL needs log-probabilities and one advantage; give both, or leave the sample out"
        )
    reward = one_number(sample, "rewards")
    return {
        "prompt": [],
        "completion": [],
        "input_ids": sample.token_ids.astype(np.int64),
        "completion_mask": sample.loss_mask.astype(np.int64),
        "old_log_probs": np.nan_to_num(sample["logprobs"], nan=0.0),
        "advantage": advantage,
        "model_version": -1 if sample.policy_version is None else sample.policy_version,
        "group_id": group_id,
        "metrics": {
            **({} if reward is None else {"reward": reward}),
            **{name: math.nan if v is None else v for name, v in read_rollout(sample.rollout).metrics.items()},
        },
    }


def read_trl(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of JSON lines, named by their group and their number in the file."""
    for number, (where, record) in enumerate(json_lines(place, nan=True)):
        with located(where):
            yield from_trl(record, id=f"{record.get('group_id', '')}/{number}", lost=lost)


def _trained_differently(sample: Sample) -> str | None:
    """Return what TRL would ignore about how the sample is to be trained, or None."""
    for name, neutral in zip(WEIGHTS, (1.0, 0.0, 0.0), strict=True):
        if name in sample and (sample[name][sample.loss_mask] != neutral).any():
            return f"{name} other than {neutral:g}"
    return None if sample.mode == "rl" else f"mode {sample.mode}"


def write_trl(samples: Iterable[Sample], place: Place, lost: Lost) -> None:
    """Write one line per sample that TRL can represent. Groups are numbered in order of appearance."""
    groups: dict[str, int] = {}
    with place.writing() as file:
        for sample in samples:
            if not lost.keeps(sample, needs=("logprobs", "advantages")):
                continue
            if one_number(sample, "advantages") is None:
                lost.left_out["advantages that differ from token to token"] += 1
                continue
            if (reason := _trained_differently(sample)) is not None:
                lost.left_out[reason] += 1
                continue
            lost.columns(sample, held=HELD)
            lost.unwritten.update(["rewards"] if "rewards" in sample and one_number(sample, "rewards") is None else [])
            fields = rollout_fields(sample, groups.setdefault(sample.group or sample.id, len(groups)))
            plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in fields.items()}
            plain["metrics"] = {name: None if math.isnan(value) else value for name, value in fields["metrics"].items()}
            file.write(json.dumps(plain, allow_nan=False, separators=(",", ":")).encode() + b"\n")
