"""Groups that no rank trained on, read from the plane's log and frames: evaluation, dropped and quarantined groups.

Evaluation groups are shown as a run of their own, with one step per evaluated policy version. Dropped groups have only
a row in the log, because their frames are freed at once. Frames in quarantine are kept until an operator decides about
them. A plane may be running on the folder; a group it deletes during the read is counted as skipped.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.arrays import Sample
from penstock.errors import CorruptFile, PenstockError, UnknownKey
from penstock.frames import decode
from penstock.log import State, is_run, reading
from penstock.packing import pack
from penstock.runs import EvaluationGroup, evaluations_of, read_run, read_stored, stored_samples, unused_groups
from penstock.view.batch_records import BatchCopy
from penstock.view.folders import Done
from penstock.view.jsonl import encode_line
from penstock.view.record import SCHEMA_VERSION, Record, Skipped

logger = logging.getLogger("penstock.view")
EVALUATION = "(evaluation)"
"""Used in place of a run's name. No run can have this name."""
MOST = 1000
"""Groups listed. Counts include all."""


class FrameStep(ABC):
    """A step whose records are made from the plane's frames, because no rank exported it."""

    __slots__ = ()

    @abstractmethod
    def lines(self, skipped: Skipped) -> Iterator[tuple[Callable[[], bytes], Record]]:
        """Yield every record with a function that reads its line again."""

    def records(self, skipped: Skipped | None = None) -> Iterator[Record]:
        for _, record in self.lines(skipped or Skipped()):
            yield record

    def done(self) -> dict[int, Done]:
        """Empty: no rank wrote it."""
        return {}

    def files(self) -> dict[int, Path]:
        """Empty: no rank wrote it."""
        return {}

    def altered(self) -> list[str]:
        """Empty: frames carry checksums, and corrupt ones are skipped."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStep(FrameStep):
    """The evaluation groups of one policy version."""

    number: int
    """The policy version, 0 also if unknown."""
    groups: tuple[EvaluationGroup, ...]
    path: Path
    """The plane's folder."""
    run: str = EVALUATION

    @property
    def stamp(self) -> int:
        """Changes when the groups change."""
        return hash(tuple(group.id for group in self.groups))

    def lines(self, skipped: Skipped) -> Iterator[tuple[Callable[[], bytes], Record]]:
        """Yield every record with a function that reads its line again."""
        for group in self.groups:
            try:
                samples = decode(read_stored(self.path, group.location))
            except PenstockError as error:
                skipped.add(group.id, error)
                continue
            for i, sample in enumerate(samples):
                yield partial(self._line, group, i), record_of(sample, step=self.number, index=i)

    def _line(self, group: EvaluationGroup, index: int) -> bytes:
        try:
            samples = decode(read_stored(self.path, group.location))
        except PenstockError as error:
            raise UnknownKey(f"group {group.id!r}: its frame was freed: {error}") from None
        return encode_line(record_of(samples[index], step=self.number, index=index))


def plane_of(folder: Path) -> Path | None:
    """Return the folder of a run's plane, the run's own or `plane` inside it; None if there is none."""
    return next((path for path in (folder, folder / "plane") if is_run(path)), None)


def evaluation_steps(folder: Path) -> list[EvaluationStep]:
    """Return the stored evaluation groups of a run's folder by policy version."""
    plane = plane_of(folder)
    if plane is None:
        return []
    try:
        found = evaluations_of(plane)
    except CorruptFile as error:  # the ranks' exports can still be shown
        logger.warning("evaluation groups are not shown: %s", error)
        return []
    by_version: dict[int, list[EvaluationGroup]] = {}
    for group in found:
        by_version.setdefault(group.policy_version or 0, []).append(group)
    return [
        EvaluationStep(number=version, groups=tuple(groups), path=plane)
        for version, groups in sorted(by_version.items())
    ]


def record_of(sample: Sample, *, step: int, index: int, rank: int = 0, version: int | None = None) -> Record:
    """Make the record of a sample without loss terms. `version` is that of the policy its step was drawn for."""
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "export_step": step,
        "rank": rank,
        "micro_step": index,
        "micro_sequence_idx": 0,
        "export_sequence_idx": index,
    }
    (batch,) = pack([sample], ranks=1, seq_len=sample.num_tokens, columns=tuple(sample.own.values())).ranks[0]
    copy = BatchCopy.of(batch, None)
    return next(copy.records(fields, version, untrained=True))


def dropped_of(folder: Path) -> dict[str, Any]:
    """Return a run's ledger and its last dropped and quarantined groups. `ledger` is None without a plane."""
    plane = plane_of(folder)
    if plane is None:
        return {"ledger": None, "groups": []}
    try:
        ledger = read_run(plane, steps=0, groups=0)["ledger"]
        groups = unused_groups(plane, most=MOST)
        lengths = _lengths(plane)
    except CorruptFile as error:
        return {"ledger": None, "groups": [], "error": str(error)}
    rows = [
        {
            "id": one.id,
            "prompt": one.prompt,
            "state": one.state,
            "reason": one.reason,
            "samples": one.samples,
            "tokens": one.tokens,
            "policy_version": one.policy_version,
            "is_kept": bool(one.location),
        }
        for one in groups
    ]
    return {"ledger": ledger, "groups": rows, "lengths": lengths}


def _lengths(plane: Path) -> dict[str, float]:
    """Return the mean tokens of a sample by what became of it. A loss of long samples shows as a difference."""
    query = (
        "SELECT state, CAST(SUM(tokens) AS BIGINT), CAST(SUM(samples) AS BIGINT) FROM groups WHERE state != ? "
        "GROUP BY state"
    )
    with reading(plane) as log:
        rows = list(log.rows(query, (int(State.EVALUATION),)))
    found = {State(state).name.lower(): tokens / samples for state, tokens, samples in rows if samples}
    samples = sum(samples for _, _, samples in rows)
    return found | ({"accepted": sum(tokens for _, tokens, _ in rows) / samples} if samples else {})


def records_of(folder: Path, group: str) -> list[Record]:
    """Return the rollouts of a quarantined group. Raises if its frame was freed."""
    plane = plane_of(folder)
    found = [] if plane is None else unused_groups(plane, group=group)
    if plane is None or not found or not found[0].location:
        raise UnknownKey(f"group {group[:80]!r}: its frame is not stored, only its row in the log")
    try:
        samples = stored_samples(plane, found[0].id, found[0].location)
    except PenstockError as error:
        raise UnknownKey(f"group {group[:80]!r}: its frame was freed: {error}") from None
    return [record_of(sample, step=0, index=i) for i, sample in enumerate(samples)]
