"""What happened over a run, from its plane's log: rewards of environments and prompts, and events to mark on curves.

Rewards need neither exports nor frames. Events are processes killed and restarted, rewinds, evictions, quarantines.
They come from three sources. The plane's log has its starts and ends, the trainers that joined, and the groups that
were quarantined or lost. `events.jsonl` has the processes that the launcher of `penstock demo` and `penstock train`
saw die. Exports show steps that were trained again, for runs without a plane.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.errors import Conflict, CorruptFile, InvalidInput, LogAway, UnknownKey
from penstock.log import (
    EvictTenant,
    LogReader,
    Lose,
    Quarantine,
    Record,
    RunEvent,
    State,
    is_gone,
    plane_of,
    reading,
    run_events_of,
)
from penstock.plane import SETTINGS, read_manifest
from penstock.runs import LoggedStep, logged_steps
from penstock.view.plane_steps import logger
from penstock.view.run_files import RunState, last_lines

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


# ------------------------------------------------------------------ events


DIED = "events.jsonl"
_MOST = 1000
"""Events of a kind that are shown: the newest."""
_QUIET_S = 60.0
"""Behind a connection pooler a database may not see a plane that is running. One that accepted a group within this time
counts as running."""
_MAX_TEXT = 300


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A mark on a run's curves."""

    kind: str
    """kill, restart, rewind, evict, quarantine or lose."""
    step: int
    """The step that was to be trained next."""
    text: str
    at: float | None = None
    """Unix time, None if unknown."""


class _Died(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `events.jsonl`."""

    at: float
    step: int
    what: str


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ_DIED = msgspec.json.Decoder(_Died)


@dataclass(frozen=True, slots=True)
class Noted:
    """What a plane's log says about its run."""

    events: tuple[Event, ...] = ()
    state: RunState | None = None
    """The state of the plane, None if unknown."""
    last: float | None = None
    """When the newest sample of the last trained step was accepted."""
    settings: str = ""
    """The settings that the plane runs with, as TOML."""


@dataclass(slots=True)
class PlaneNotes:
    """Reads the log of the plane in a run's folder. Records read before are not read again."""

    folder: Path
    _decided: list[Event] = field(default_factory=list)
    _after: int = 0
    """The last record that was read."""
    _said: str = ""

    def read(self) -> Noted:
        """Return what the log says now. Empty if there is no plane, or its log cannot be read."""
        plane = plane_of(self.folder)
        if plane is None:
            return Noted()
        try:
            with reading(plane) as log:
                moments = run_events_of(log)
                self._read_decisions(log)
                last, texts = _last_trained(log), log.texts(SETTINGS)
                state = plane_state(moments, log.is_open(), _last_accepted(log))
        except (Conflict, CorruptFile, LogAway) as error:
            if str(error) != self._said:  # a page looks twice a second
                self._said = str(error)
                logger.warning("events are not shown: %s", error)
            return Noted(tuple(self._decided))
        found = sorted((*self._decided, *of_processes(moments)), key=lambda event: (event.step, event.at or 0))
        return Noted(tuple(found), state, last, texts[max(texts)] if texts else "")

    def _read_decisions(self, log: LogReader) -> None:
        row = log.first("SELECT MAX(op) FROM records")
        newest = 0 if row is None else row[0] or 0
        if newest < self._after:  # the log was restored from a copy
            self._decided, self._after = [], 0
        records = log.records(after=self._after)
        tenant = "environment" if log.text("tables_by") == "env" else "tenant"
        found = [(op, one) for op, record in records if (one := _decision(record, tenant)) is not None]
        self._after = newest
        if found:
            steps = sorted((op, step) for step, op in log.rows("SELECT step, op FROM steps"))
            self._decided = [*self._decided, *(_placed(log, steps, op, *one) for op, one in found[-_MOST:])][-_MOST:]


def _decision(record: Record, tenant: str) -> tuple[str, str] | None:
    """Return kind and text of a decision that is marked, None for others. `tenant` is what the run calls a tenant."""
    if isinstance(record, EvictTenant):
        return "evict", f"{tenant} {record.tenant!r} was evicted: {record.reason}"
    if isinstance(record, Quarantine | Lose):
        many = "1 group was" if len(record.groups) == 1 else f"{len(record.groups)} groups were"
        if isinstance(record, Quarantine):
            kind, what = "quarantine", "quarantined"
        else:
            kind, what = "lose", "lost" if record.reason == "lost" else "dropped"
        return kind, f"{many} {what}: {next(iter(record.groups.values()), '')}"
    return None


def _placed(log: LogReader, steps: Sequence[tuple[int, int]], op: int, kind: str, text: str) -> Event:
    """Place a decision before the step that was planned next. Steps are (op, number), sorted."""
    i = bisect_left(steps, (op, 0))
    step = steps[i][1] if i < len(steps) else steps[-1][1] + 1 if steps else 1
    row = log.first("SELECT at FROM groups WHERE op <= ? ORDER BY op DESC LIMIT 1", (op,))
    return Event(kind=kind, step=step, text=text[:_MAX_TEXT], at=None if row is None else row[0] or None)


def _last_accepted(log: LogReader) -> float:
    row = log.first("SELECT at FROM groups ORDER BY op DESC LIMIT 1")
    return 0.0 if row is None else float(row[0])


def _last_trained(log: LogReader) -> float | None:
    query = "SELECT manifest FROM steps WHERE step < ? ORDER BY step DESC LIMIT 1"
    row = log.first(query, (log.meta("next_step", 1),))
    groups = () if row is None else read_manifest(row[0]).groups
    found = log.first("SELECT at FROM groups WHERE op = ?", (max(groups),)) if groups else None
    return None if found is None else found[0] or None


def of_processes(moments: Sequence[RunEvent]) -> Iterator[Event]:
    """Yield a mark for every plane and every trainer that came after another one."""
    trained = False
    for i, one in enumerate(moments):
        if one.kind == "start" and i:
            how = "ended without closing its log and was" if one.is_lost else "was closed and"
            kind = "kill" if one.is_lost else "restart"
            yield Event(kind=kind, step=one.step, at=one.at, text=f"the plane {how} started again (epoch {one.epoch})")
        if one.kind == "trainer":
            if trained or one.was != one.step:
                yield _of_trainer(one)
            trained = True


def _of_trainer(one: RunEvent) -> Event:
    kind, how = "restart", "the trainer joined again"
    if one.was > one.step:
        kind, how = "rewind", f"{how} at step {one.step}: {_steps(one.step, one.was)} trained again"
    elif one.was < one.step:
        how = f"{how} at step {one.step}: {_steps(one.was, one.step)} taken for trained"
    elif one.after:
        kind = "kill"
    why = f" after {one.after}" if one.after else ""
    return Event(kind=kind, step=one.step, at=one.at, text=how + why)


def _steps(first: int, end: int) -> str:
    """Name the steps before `end`, with their verb.

    >>> _steps(4, 5), _steps(4, 7)
    ('step 4 was', 'steps 4 to 6 were')
    """
    return f"step {first} was" if end - first == 1 else f"steps {first} to {end - 1} were"


def plane_state(moments: Sequence[RunEvent], is_open: bool | None, accepted: float) -> RunState | None:
    """Return whether a run's plane works. `is_open` is what the database knows, `accepted` when a group came last."""
    known = [one for one in moments if one.kind != "trainer"]
    if not known:
        return None
    last, began = known[-1], known[0].at
    if last.kind == "end":
        return RunState(state="stopped", began=began, ended=last.at, of="plane")
    heard = max(moments[-1].at, accepted)
    is_lost = is_open is False and time.time() - heard > _QUIET_S
    if is_lost or is_gone(last.space, last.pid):
        return RunState(state="gone", began=began, ended=heard, of="plane")
    return RunState(state="running", began=began, pid=last.pid, host=last.host, of="plane")


def note_death(folder: Path, *, step: int, what: str) -> None:
    """Append a line to `events.jsonl`: a process of the run died."""
    with (folder / DIED).open("ab") as file:
        file.write(msgspec.json.encode(_Died(at=time.time(), step=step, what=what)) + b"\n")


def deaths_of(folder: Path) -> list[Event]:
    """Return the processes that the run's launcher saw die."""
    found = []
    for line in last_lines(folder / DIED)[-_MOST:]:
        try:
            one = _READ_DIED.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):  # the first line may be cut
            continue
        found.append(Event(kind="kill", step=one.step, at=one.at, text=one.what[:_MAX_TEXT]))
    return found


def of_exports(points: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """Yield a mark for every exported step that was written again, or by another start of the trainer."""
    attempt = ""
    for point in points:
        now = point.get("attempt") or ""
        if point.get("again"):
            yield Event(kind="rewind", step=point["step"], text=f"step {point['step']} was trained again")
        elif attempt and now and now != attempt:
            yield Event(kind="restart", step=point["step"], text=f"the trainer was started again (attempt {now})")
        attempt = now or attempt
