"""Rewards of environments and prompts over a run, from its plane's log. Needs neither exports nor frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import CorruptFile, InvalidInput, UnknownKey
from penstock.log import State, reading
from penstock.runs import LoggedStep, logged_steps
from penstock.view.plane_steps import plane_of

MOST_PROMPTS = 1000
MOST_ENVS = 100
_POINTS = 60
"""Points of a small curve. Longer histories are averaged into as many."""
_RECENT = 10
"""Steps that count as recent."""
_MOST_REASONS, _MAX_REASON = 20, 120
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
        steps, trained = _trained_in(plane)
    except CorruptFile as error:
        return {"envs": None, "prompts": None, "error": str(error)}
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


def _trained_in(plane: Path) -> tuple[list[LoggedStep], list[_Trained]]:
    """Return the steps of a run and the groups in them, oldest first."""
    steps = logged_steps(plane)
    with reading(plane) as log:
        prompts = dict(log.rows("SELECT op, prompt FROM groups"))
    return steps, [one for step in steps for one in _groups_of(step, prompts)]


def over_steps(folder: Path, of: str, name: str) -> dict[str, Any]:
    """Return one environment or one prompt over the steps that trained it. `of` is "env" or "prompt"."""
    if of not in ("env", "prompt"):
        raise InvalidInput(f"of: {of[:40]!r}; give env or prompt")
    plane = plane_of(folder)
    trained = [] if plane is None else _trained_in(plane)[1]
    chosen = [one for one in trained if getattr(one, of) == name]
    if plane is None or not chosen:
        raise UnknownKey(f"{of} {name[:80]!r}: no step has trained it")
    by_step = _by([one.step for one in chosen], chosen)
    values = {
        number: [_mean([one.numbers[i] for one in groups]) for groups in by_step.values()]
        for i, number in enumerate(_NUMBERS)
    }
    unscored = [sum(one.numbers[0] is None for one in groups) / len(groups) for groups in by_step.values()]
    prompts = {one.prompt for one in chosen}
    return {
        "steps": list(by_step),
        "groups": [len(groups) for groups in by_step.values()],
        **values,
        "unscored": unscored,
        "envs": sorted({one.env for one in chosen}),
        "num_prompts": len(prompts),
        "unused": _unused(plane, prompts),
    }


def _unused(plane: Path, prompts: set[str]) -> dict[str, int]:
    """Count groups of these prompts that were accepted and never trained, by reason."""
    query = "SELECT prompt, reason, COUNT(*) FROM groups WHERE state IN (?, ?) GROUP BY prompt, reason"
    found: Counter[str] = Counter()
    with reading(plane) as log:
        for prompt, reason, count in log.rows(query, (int(State.DROPPED), int(State.QUARANTINED))):
            if prompt in prompts:
                found[reason[:_MAX_REASON]] += int(count)
    return dict(found.most_common(_MOST_REASONS))


def _groups_of(step: LoggedStep, prompts: dict[int, str]) -> Iterator[_Trained]:
    summaries = step.manifest.summaries
    columns = [summaries.numbers(name) for name in _NUMBERS]
    if len(columns[0]) != len(step.manifest.groups):  # a step of an earlier version
        return
    for op, env, *numbers in zip(step.manifest.groups, summaries.names(), *columns, strict=True):
        yield _Trained(step.number, prompts.get(op, ""), env, tuple(numbers))


_Key = TypeVar("_Key", int, str)


def _by(names: Sequence[_Key], trained: Sequence[_Trained]) -> dict[_Key, list[_Trained]]:
    found: dict[_Key, list[_Trained]] = {}
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
