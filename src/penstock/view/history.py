"""What became of environments and prompts over a run, from its plane's log: for good, with or without exports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile
from penstock.log import reading
from penstock.runs import LoggedStep, logged_steps
from penstock.view.plane_groups import plane_of

MOST_PROMPTS = 1000
MOST_ENVS = 100
_POINTS = 60
"""Points of a small curve. Longer histories are averaged into as many."""
_RECENT = 10
"""Steps that count as recent."""
_NUMBERS = ("reward", "length", "seconds", "truncated")


@dataclass(frozen=True, slots=True)
class _Trained:
    """A group in a step."""

    step: int
    prompt: str
    env: str
    numbers: tuple[float | None, ...]
    """In the order of `_NUMBERS`."""


def history_of(folder: Path) -> dict[str, Any]:
    """Return environments and prompts of a run, with their rewards over steps. Both are None without a plane."""
    plane = plane_of(folder)
    if plane is None:
        return {"envs": None, "prompts": None}
    try:
        steps = logged_steps(plane)
        with reading(plane) as log:
            prompts = dict(log.rows("SELECT op, prompt FROM groups"))
    except CorruptFile as error:
        return {"envs": None, "prompts": None, "error": str(error)}
    trained = [one for step in steps for one in _groups_of(step, prompts)]
    envs, by_prompt = _by([one.env for one in trained], trained), _by([one.prompt for one in trained], trained)
    most_used = sorted(by_prompt.items(), key=lambda item: -len(item[1]))
    last = steps[-1].number if steps else 0
    return {
        "steps": len(steps),
        "groups": len(trained),
        "envs": [_env(name, groups, last) for name, groups in list(envs.items())[:MOST_ENVS]],
        "num_envs": len(envs),
        "prompts": [_prompt(name, groups) for name, groups in most_used[:MOST_PROMPTS]],
        "num_prompts": len(by_prompt),
    }


def _groups_of(step: LoggedStep, prompts: dict[int, str]) -> Iterator[_Trained]:
    summaries = step.manifest.summaries
    columns = [summaries.numbers(name) for name in _NUMBERS]
    if len(columns[0]) != len(step.manifest.groups):  # a step of an earlier version
        return
    for op, env, *numbers in zip(step.manifest.groups, summaries.names(), *columns, strict=True):
        yield _Trained(step.number, prompts.get(op, ""), env, tuple(numbers))


def _by(names: Sequence[str], trained: Sequence[_Trained]) -> dict[str, list[_Trained]]:
    found: dict[str, list[_Trained]] = {}
    for name, one in zip(names, trained, strict=True):
        found.setdefault(name, []).append(one)
    return found


def _env(name: str, groups: Sequence[_Trained], last: int) -> dict[str, Any]:
    recent = [one for one in groups if one.step > last - _RECENT]
    now = {number: _mean([one.numbers[i] for one in recent]) for i, number in enumerate(_NUMBERS)}
    return {"env": name, "groups": len(groups), "share": len(recent), **now, "curve": _curve(groups)}


def _prompt(name: str, groups: Sequence[_Trained]) -> dict[str, Any]:
    rewards = [one.numbers[0] for one in groups if one.numbers[0] is not None]
    return {
        "prompt": name,
        "env": groups[-1].env,
        "groups": len(groups),
        "first": rewards[0] if rewards else None,
        "last": rewards[-1] if rewards else None,
        "best": max(rewards, default=None),
        "mean": _mean(rewards),
        "last_step": groups[-1].step,
        "curve": _curve(groups),
    }


def _curve(groups: Sequence[_Trained]) -> list[float]:
    """Return rewards over time, averaged so that there are at most `_POINTS`."""
    rewards = [one.numbers[0] for one in groups if one.numbers[0] is not None]
    if len(rewards) <= _POINTS:
        return rewards
    cuts = [len(rewards) * i // _POINTS for i in range(_POINTS + 1)]
    return [sum(rewards[a:b]) / (b - a) for a, b in pairwise(cuts)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
