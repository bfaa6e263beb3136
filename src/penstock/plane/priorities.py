"""Priorities that ranks report, combined per step so that the order of reports does not matter.

Each rank reports the samples it trained, and a group's samples may be on several ranks. The rule: **a group's priority
is the largest value that any rank reported for it, or for one of its samples, in the last step that reported it.**
Reports of a step wait in the log until the step is committed and take effect with the commit. A report that arrives
later, because it was lost and sent again, is combined with what took effect, unless a later step has reported the group
since:

    step 4, rank 0 reports g/0 = 0.2    step 4, rank 1 reports g/3 = 0.7    commit of step 4    g has priority 0.7
    a lost report of step 4, g/1 = 0.9, arrives after the commit of step 5:
        g was not reported in step 5    g has priority 0.9
        g was reported as 0.1 there     g keeps 0.1
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.arrays import check_priority
from penstock.errors import InvalidInput
from penstock.log import ForgetReports, Prioritize, Report

if TYPE_CHECKING:
    from penstock.frames import GroupMetadata
    from penstock.plane.manifest import Manifest
    from penstock.plane.recorder import Recorder

KEPT_STEPS = 8
"""Late reports count for this many committed steps."""
Values = dict[str, float]


class Reports(msgspec.Struct, array_like=True):
    """Reported priorities, by step and group."""

    waiting: dict[int, Values] = msgspec.field(default_factory=dict)
    """Reports of steps that are not committed yet."""
    applied: dict[int, Values] = msgspec.field(default_factory=dict)
    """Reports of the last committed steps, which took effect."""

    def follow(self, record: Report | ForgetReports) -> None:
        """Combine a report with the others of its step, or forget steps that will be trained and reported again."""
        if isinstance(record, Report):
            merge(self.waiting.setdefault(record.step, {}), record.priorities)
        else:
            self.waiting = {step: values for step, values in self.waiting.items() if step < record.first}
            self.applied = {step: values for step, values in self.applied.items() if step < record.first}

    def apply(self, step: int, values: Mapping[str, float]) -> None:
        """Note that the priorities of a step took effect."""
        self.waiting.pop(step, None)
        merge(self.applied.setdefault(step, {}), values)
        for old in [s for s in self.applied if s <= step - KEPT_STEPS]:
            del self.applied[old]

    def has_from(self, first: int) -> bool:
        return any(step >= first for step in (*self.waiting, *self.applied))

    def late(self, step: int, values: Mapping[str, float]) -> Values:
        """Return what a late report of a committed step changes."""
        if step not in self.applied:
            return {}
        later = {group for other, found in self.applied.items() if other > step for group in found}
        known = self.applied[step]
        return {g: v for g, v in values.items() if g not in later and (g not in known or v > known[g])}


def merge(into: Values, values: Mapping[str, float]) -> None:
    for group, value in values.items():
        into[group] = max(value, into.get(group, 0.0))


def report(recorder: Recorder, priorities: Mapping[str, float], step: int | None) -> None:
    """Record the priorities that a rank reported for a step. Without a step they take effect at once."""
    state = recorder.state
    if step is not None and step > state.last_step:
        raise InvalidInput(f"priorities of step {step}: the last step that was planned is {state.last_step}")
    found = _by_group(recorder, priorities, None if step is None else state.steps.get(step))
    if step is None:
        record: Prioritize | Report = Prioritize(priorities=found)
    elif step >= state.next_step:
        record = Report(step=step, priorities=found)
    else:
        record = Prioritize(priorities=state.reports.late(step, found), step=step)
    if record.priorities:
        recorder.decide(record)


def _by_group(recorder: Recorder, priorities: Mapping[str, float], step: Manifest | None) -> Values:
    """Return the largest value for each held group, from ids of groups and of samples.

    An id such as GROUP/3 names its group, if that group is in the step. Other ids are looked up among the samples of
    the step's groups, which takes their metadata from the log: 7 us for each group. In a step with names that clash all
    ids are, and one that means two things counts for both. If no sample has the id, it may name any held group."""
    held, rows = recorder.tenant_tables, recorder.state.rows
    ops, clash = ((), False) if step is None else (step.groups, step.names_clash)
    of_step = {rows[op].id for op in ops if op in rows}
    found: Values = {}
    others: Values = {}
    for name, value in priorities.items():
        check_priority(name, value)
        prefix = name.rpartition("/")[0]
        if clash or (name not in of_step and prefix not in of_step):
            others[name] = value
        else:
            merge(found, {name if name in of_step else prefix: value})
    if others:
        groups = _groups_of(recorder.log.metadata_of(ops).values())
        for name, value in others.items():
            owners = [*groups.get(name, ()), *([name] if name in of_step else ())]
            owners = owners or [one for one in (name, name.rpartition("/")[0]) if one in held][:1]
            recorder.counts["priorities_unknown"] += not owners
            merge(found, dict.fromkeys(owners, value))
    return {group: value for group, value in found.items() if group in held}


def names_clash(groups: Sequence[GroupMetadata]) -> bool:
    """Return whether a sample is named like another of these groups, or like a sample of one that has no name.

    >>> from types import SimpleNamespace as Group
    >>> names_clash([Group(group="a", ids=("a/0", "b/0")), Group(group="b", ids=("b/0",))])
    True
    >>> names_clash([Group(group="a", ids=("a/0", "c/0")), Group(group="b", ids=("b/0",))])
    False
    """
    names = {one.group for one in groups}
    return any(
        named in names and named != one.group
        for one in groups
        for sample in one.ids
        for named in (sample, sample.rpartition("/")[0])
    )


class _Names(msgspec.Struct, array_like=True):
    """The first fields of `GroupMetadata`, up to the ids. The rest is not decoded, which is most of the work."""

    format: int
    group: str
    prompt: msgspec.Raw
    run: msgspec.Raw
    seq_len: msgspec.Raw
    num_tokens: msgspec.Raw
    policy_version: msgspec.Raw
    kinds: msgspec.Raw
    columns: msgspec.Raw
    ids: tuple[str, ...]


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(_Names)


def _groups_of(metadata: Iterable[bytes]) -> dict[str, list[str]]:
    """Map sample ids to the groups that have such a sample."""
    found: dict[str, list[str]] = defaultdict(list)
    for data in metadata:
        names = _READ.decode(zlib.decompress(data))
        for sample in names.ids:
            found[sample].append(names.group)
    return found
