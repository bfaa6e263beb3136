"""Read ATIF, the trajectory format of harbor's agents and of NeMo-Gym's export, version 1.3 and later.

    {"schema_version": "ATIF-v1.7", "trajectory_id": "t1", "agent": {"name": "terminus", ...}, "steps": [
        {"step_id": 2, "source": "agent", "metrics": {
            "prompt_token_ids": [...], "completion_token_ids": [...], "logprobs": [...]}, ...}, ...]}

Each step of an agent that has token ids is one model call, with the complete prompt it saw. Steps copied from another
trajectory (`is_copied_context`) are trained there and left out here. Text alone is not enough: a step without token
ids is counted. A file holds one trajectory, as harbor and NeMo-Gym write it, or one per line. Embedded subagents become
trajectories of their own.

ATIF has no reward. It is read from `extra.reward`, or from harbor's `verifier/reward.txt` beside the `agent` folder of
the file. NeMo-Gym's task index makes the groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.arrays import Sample
from penstock.capture import (
    Trajectory,
    field_of,
    from_steps,
    list_of,
    located,
    number_of,
    optional_list,
    optional_mapping,
)
from penstock.convert import to_samples
from penstock.errors import InvalidInput
from penstock.integrations.formats.file_or_stream import MAX_LINE_BYTES, Lost, Place, json_lines, json_object

MARK = b'"ATIF-v'
_IDS = ("prompt_token_ids", "completion_token_ids")


def from_atif(record: Any, *, lost: Lost | None = None, **fields: Any) -> list[Trajectory]:
    """Convert an ATIF trajectory and its embedded subagents. `fields` are those of `Trajectory`, of the first one.

    >>> metrics = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}
    >>> steps = [{"step_id": 1, "source": "agent", "message": "3", "metrics": metrics}]
    >>> from_atif({"schema_version": "ATIF-v1.7", "trajectory_id": "t", "agent": {"name": "a"}, "steps": steps})
    [Trajectory(2 turns, 3 tokens, 1 sampled, reward=None, id='t', env='')]
    """
    lost = Lost() if lost is None else lost
    name = str(field_of(record, "trajectory_id") or field_of(record, "session_id") or "")
    where = f"trajectory {name!r}"
    if not str(field_of(record, "schema_version", "")).startswith("ATIF-v1."):
        raise InvalidInput(f"{where}.schema_version: {field_of(record, 'schema_version')!r:.40}; must be ATIF-v1.N")
    calls = [call for step in list_of(record, "steps", where) if (call := _call(step, lost))]
    extra = optional_mapping(record, "extra", where)
    reward = None if extra.get("reward") is None else number_of(extra, "reward", f"{where}.extra")
    agent = str(field_of(field_of(record, "agent"), "name", "") or "")
    if field_of(record, "continued_trajectory_ref"):
        lost.unread["continued_trajectory_ref"] += 1
    own = [from_steps(calls, **{"id": name, "agent": agent, "reward": reward, **fields})] if calls else []
    lost.unread.update([] if calls else ["trajectory without token ids"])
    for child in optional_list(record, "subagent_trajectories", where):
        own += from_atif(child, lost=lost)
    return own


def _call(step: Any, lost: Lost) -> dict[str, Any] | None:
    """Return a step as the model call that `from_steps` reads. None if it is not a model call, or has no ids."""
    if field_of(step, "source") != "agent" or field_of(step, "llm_call_count") == 0:
        return None
    metrics = field_of(step, "metrics")
    several = isinstance(count := field_of(step, "llm_call_count"), int) and count > 1
    reasons = {
        "copied step": field_of(step, "is_copied_context"),
        "agent step without token ids": not all(field_of(metrics, name) for name in _IDS),
        "agent step of several model calls": several,
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    if reason is not None:
        lost.unread[reason] += 1
        return None
    prompt, completion = (field_of(metrics, name) for name in _IDS)
    return {"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": field_of(metrics, "logprobs")}


def read_atif(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of a file with one trajectory, or with one per line."""
    found = False
    for where, record in _records(place):
        extra = optional_mapping(record, "extra", where)
        task = field_of(field_of(extra.get("nemo_gym"), "source"), "task_index")
        fields = {} if extra.get("reward") is not None else _harbor_reward(place)
        with located(where):
            rollouts = from_atif(record, lost=lost, **fields)
        for i, rollout in enumerate(rollouts):
            name = rollout.id or f"{place.short}:{i}"
            group = name if task is None else f"{record.get('session_id') or place.short}:{task}"
            found = True
            yield from to_samples(rollout, group=group, prompt=group, id=name)
    if not found:
        raise InvalidInput(f"{place.name}: no step has token ids; record prompt_token_ids and completion_token_ids")


def _records(place: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    if not place.is_stream:
        with place.reading() as file:
            if MARK not in file.readline(MAX_LINE_BYTES):  # one object over several lines
                file.seek(0)
                yield place.name, json_object(file.read(MAX_LINE_BYTES), place.name)
                return
    yield from json_lines(place)


def _harbor_reward(place: Place) -> Mapping[str, Any]:
    """Return the reward of harbor's trial: trial/agent/trajectory.json lies beside trial/verifier/reward.txt."""
    path = Path() if place.is_stream else place.path.parent.parent / "verifier" / "reward.txt"
    if place.is_stream or place.path.parent.name != "agent" or not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8").strip()
    try:
        return {"reward": float(text)}
    except ValueError:
        raise InvalidInput(f"{path}: {text[:40]!r}; must be a number") from None
