"""Events of groups: what became of each, written to the log in the transaction that writes its state.

Nothing here decides. The transaction that changes a group's state in the log also appends its event. After a crash that
is the first transaction of the next start. So every event is written exactly once, whenever the plane is killed:

    steps     the log has `reported_step`, the last step whose groups were reported. If more steps are committed by now,
              they are reported; if fewer are, the trainer went back to an older checkpoint, which is an event too
    dropped,  a group's row gets the state DROPPED or QUARANTINED: its event goes beside it. After a restart only rows
    set aside that the log has differently are written, so only their events
    others    written with their own decision: samples that were filtered out before a put, evaluation groups
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import InvalidInput
from penstock.log import MAX_EVENTS, GroupOutcome, GroupRow, Log, State, Summary, Unlisted
from penstock.plane.manifest import Manifest, read_manifest
from penstock.protocol import MAX_PAGE, Discard, FeedbackEvent

if TYPE_CHECKING:
    from penstock.plane.state import PlaneState

_REPORTED = "reported_step"
_ROWS = 64
"""Rows of outcomes that are read at once."""
ENDS = {State.DROPPED: "dropped", State.QUARANTINED: "quarantined"}


class Outcomes:
    """Numbers and writes the events of one plane. The log is the truth: this is what it has."""

    def __init__(self) -> None:
        self.last = 0
        """Number of the last event in the log."""
        self.reported_step = 0
        """The last step whose groups were reported as trained."""
        self.added: list[GroupOutcome] = []
        """Events of the decision in the transaction under way."""
        self.is_written = False
        """Whether the transaction under way has events."""
        self._written = (0, 0)
        """`last` and `reported_step` once it is committed."""

    def load(self, log: Log) -> None:
        """Continue where the log ends."""
        self.last, self.reported_step = log.num_events, log.meta(_REPORTED, 0)

    def add(self, outcome: GroupOutcome) -> None:
        """Append an event in the transaction under way."""
        self.added.append(outcome)

    def write(self, log: Log, state: PlaneState, changed: Mapping[tuple[State, str], Sequence[int]]) -> None:
        """Write the events that the log lacks. `changed` are the groups whose states are written beside them."""
        now = max(state.next_step - 1, 0)
        rows, last = [], self.last
        for outcome in (*_of_steps(log, state, self.reported_step, now), *_of_ends(state, changed), *self.added):
            last += outcome.num_events
            rows.append((last, outcome))
        if rows:
            log.add_outcomes(rows)
        if now != self.reported_step:
            log.set_meta(_REPORTED, now)
        self._written, self.is_written = (last, now), True

    def written(self) -> None:
        """Note that the transaction was committed."""
        (self.last, self.reported_step), self.added = self._written, []
        self.is_written = False

    def undo(self) -> None:
        """Note that the transaction failed."""
        self.added, self.is_written = [], False


def _of_steps(log: Log, state: PlaneState, reported: int, now: int) -> Iterator[GroupOutcome]:
    """Yield the events of committed steps, given the last one that was reported."""
    if now < reported:
        steps = f"steps {now + 1} to {reported} are" if now + 1 < reported else f"step {reported} is"
        why = f"{steps} trained again"
        yield GroupOutcome(outcome="rewound", reason=why, step=now + 1, unlisted=(Unlisted(),))
    for step, manifest in _manifests(log, state, range(reported + 1, now + 1)):
        yield from _rows("trained", tuple(dict.fromkeys(manifest.groups)), step=step, version=manifest.policy_version)


def _manifests(log: Log, state: PlaneState, steps: range) -> Iterator[tuple[int, Manifest]]:
    """Yield the manifests of steps, in order. A log of an earlier version has steps that memory has forgotten."""
    if steps and not all(step in state.steps or step in state.slim for step in steps):
        found = {step: data for step, _, data, _ in log.steps(first=steps[0]) if step in steps}
        yield from ((step, read_manifest(data)) for step, data in found.items())
        return
    for step in steps:
        yield step, state.steps[step] if step in state.steps else state.slim[step]


def _of_ends(state: PlaneState, changed: Mapping[tuple[State, str], Sequence[int]]) -> Iterator[GroupOutcome]:
    for (at, reason), ops in changed.items():
        if at in ENDS:
            yield from _rows(ENDS[at], ops, reason=reason, version=state.policy_version)


def _rows(outcome: str, ops: Sequence[int], *, version: int, step: int = 0, reason: str = "") -> Iterator[GroupOutcome]:
    for first in range(0, len(ops), MAX_EVENTS):
        some = tuple(ops[first : first + MAX_EVENTS])
        yield GroupOutcome(outcome=outcome, reason=reason, step=step, policy_version=version, groups=some)


def discarded(message: Discard) -> Unlisted:
    """Return what a producer says of samples that it filtered out."""
    rewards = [np.nan if one is None else one for one in message.rewards]
    with np.errstate(over="ignore"):
        summary = Summary(
            env=message.env,
            tenant=message.tenant,
            rewards=np.array(rewards, "<f4").tobytes(),
            lengths=np.array(message.lengths, "<u4").tobytes(),
        )
    return Unlisted(group=message.group, prompt=message.prompt, samples=message.samples, summary=summary)


# ------------------------------------------------------------------ reading


def cursor_of(run_id: str, number: int) -> str:
    """Return the text that names an event of a run.

    >>> cursor_of("3f9c21d07b6a4e58aa00bb11cc22dd33", 17)
    '3f9c21d07b6a.17'
    """
    return f"{run_id[:12]}.{number}"


def number_of(cursor: str, run_id: str, newest: int) -> int:
    """Return the number of the event that a cursor names; 0 for "". Raises InvalidInput for any other text."""
    if not cursor:
        return 0
    run, _, digits = cursor.partition(".")
    if len(cursor) > 40 or not (digits.isascii() and digits.isdecimal()):
        raise InvalidInput(f"after: {cursor[:60]!r}; give the `cursor` of an event, or nothing to begin at the start")
    if run != run_id[:12]:
        raise InvalidInput(
            f"after: {cursor!r} is a cursor of another run, this is {run_id[:12]}; begin without it, or open that run"
        )
    if int(digits) > newest:
        raise InvalidInput(
            f"after: {cursor!r} is ahead of the newest event, {newest}; the log was restored from an older copy: "
            "begin again without it"
        )
    return int(digits)


def events_between(log: Log, after: int, until: int) -> Iterator[FeedbackEvent]:
    """Yield the events after number `after`, up to number `until`."""
    while after < until and (events := page(log, after, min(until - after, MAX_PAGE))):
        yield from events
        after += len(events)


def page(log: Log, after: int, most: int) -> list[FeedbackEvent]:
    """Return up to `most` events after number `after`: at least one, if there is one."""
    wanted: list[tuple[int, GroupOutcome, int | Unlisted]] = []
    for last, outcome in log.outcomes(after, min(most, _ROWS)):
        first = last - outcome.num_events + 1
        parts: tuple[int | Unlisted, ...] = (*outcome.groups, *outcome.unlisted)
        # Row 8..11 and after 9: skip two of its four events.
        skipped = max(after + 1 - first, 0)
        wanted += [(first + i, outcome, parts[i]) for i in range(skipped, len(parts))][: most - len(wanted)]
        if len(wanted) == most:
            break
    ops = [part for _, _, part in wanted if isinstance(part, int)]
    rows = {row.op: row for row in log.groups_of(dict.fromkeys(ops))}
    summaries = log.summaries(list(rows))
    return [
        _event(cursor_of(log.run_id, number), outcome, part)
        if isinstance(part, Unlisted)
        else _listed(cursor_of(log.run_id, number), outcome, rows.get(part), summaries.get(part, Summary()))
        for number, outcome, part in wanted
    ]


def _listed(cursor: str, outcome: GroupOutcome, row: GroupRow | None, summary: Summary) -> FeedbackEvent:
    if row is None:  # the log was recovered without it
        return _event(cursor, outcome, Unlisted(summary=summary))
    made = row.policy_version
    return _event(
        cursor,
        outcome,
        Unlisted(group=row.id, prompt=row.prompt, samples=row.samples, summary=summary),
        staleness=None if made is None or row.is_evaluation else max(outcome.policy_version - made, 0),
    )


def _event(cursor: str, outcome: GroupOutcome, group: Unlisted, staleness: int | None = None) -> FeedbackEvent:
    rewards = np.frombuffer(group.summary.rewards, "<f4").tolist()
    return FeedbackEvent(
        cursor=cursor,
        outcome=outcome.outcome,
        reason=outcome.reason,
        group=group.group,
        prompt=group.prompt,
        env=group.summary.env,
        tenant=group.summary.tenant,
        samples=group.samples,
        rewards=tuple(None if one != one else one for one in rewards),
        lengths=tuple(np.frombuffer(group.summary.lengths, "<u4").tolist()),
        step=outcome.step or None,
        staleness=staleness,
    )
