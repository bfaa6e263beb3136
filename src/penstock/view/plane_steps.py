"""What the viewer reads of a run's plane: steps that ranks received, evaluation groups, groups that were not trained.

The log keeps a line for every step and every group in it. Tokens can be shown while their frames are kept: these are
freed some steps after they were trained (`retain`), so only the last steps can be opened. Frames do not contain what a
trainer computed: its log-probabilities, loss and masks need a `TokenExporter`.

Evaluation groups are shown as a run of their own, with one step per evaluated policy version. Dropped groups have only
a row in the log, because their frames are freed at once. Frames in quarantine are kept until an operator decides about
them. A plane may be running on the folder; a group it deletes during the read is counted as skipped.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from penstock.arrays import NO_VERSION, Sample, Samples
from penstock.errors import CorruptFile, PenstockError, UnknownKey
from penstock.log import GroupRow, State, plane_of, reading, state_of
from penstock.packing import pack
from penstock.runs import (
    LoggedStep,
    evaluations_of,
    logged_steps,
    read_run,
    stored_group,
    stored_samples,
    unused_groups,
)
from penstock.view.batch_records import BatchCopy
from penstock.view.jsonl import encode_line
from penstock.view.record import ReadLine, Record, Skipped, Step, place_fields
from penstock.view.tallies import moments_of

logger = logging.getLogger("penstock.view")
EVALUATION = "(evaluation)"
"""Used in place of a run's name. No run can have this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A group of a step, and where its samples are in the step."""

    id: str
    location: str
    first: int = 0
    """The index of its first sample."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """The rank of each sample of the step, by index."""


class FrameStep(Step):
    """A step whose records are made from the plane's frames, because no rank exported it."""

    __slots__ = ()

    @property
    def oldest_version(self) -> int:
        """Tokens of earlier policy versions were left out of the loss (`max_token_staleness`)."""
        return 0

    @abstractmethod
    def groups_in(self) -> Iterator[_Stored]:
        """Yield the groups of the step."""

    @property
    @abstractmethod
    def version(self) -> int | None:
        """The policy version for which the step was drawn."""

    def lines(self, skipped: Skipped) -> Iterator[tuple[ReadLine, Record]]:
        for group in self.groups_in():
            try:
                samples, kept = self._read(group)
            except UnknownKey as error:
                skipped.add(group.id, error)
                continue
            for i, sample in enumerate(samples):
                if kept[i]:
                    yield partial(self._line, group, i), self._record(group, i, sample, kept[i])

    def _read(self, group: _Stored) -> tuple[Samples, Sequence[int]]:
        """Return the samples of a group, and how many tokens of each a rank got."""
        try:
            if group.location:
                return stored_group(self.path, group.id, group.location)
        except PenstockError as error:
            raise UnknownKey(f"group {group.id!r}: its frame was freed: {error}") from None
        raise UnknownKey(f"group {group.id!r}: its frame was freed")

    def _record(self, group: _Stored, i: int, sample: Sample, kept: int) -> Record:
        index, rank = group.first + i, group.ranks.get(group.first + i, 0)
        trained = _without_stale(sample, self.oldest_version)
        return record_of(trained, step=self.number, index=index, rank=rank, version=self.version, kept=kept)

    def _line(self, group: _Stored, i: int) -> bytes:
        samples, kept = self._read(group)
        return encode_line(self._record(group, i, samples[i], kept[i]))


def _without_stale(sample: Sample, oldest: int) -> Sample:
    """Return a sample as ranks trained it: without the loss of tokens that too old a policy version sampled."""
    if oldest <= 0:
        return sample
    versions = sample.get("weight_versions")
    if versions is None:
        own = NO_VERSION if sample.policy_version is None else sample.policy_version
        versions = np.full(sample.num_tokens, own)
    return sample.replace(loss_mask=sample.loss_mask & ~((versions > NO_VERSION) & (versions < oldest)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStep(FrameStep):
    """The evaluation groups of one policy version."""

    number: int
    """The policy version, 0 also if unknown."""
    groups: tuple[GroupRow, ...]
    path: Path
    """The plane's folder."""
    run: str = EVALUATION
    version: int | None = None

    @property
    def stamp(self) -> int:
        """Changes when the groups change."""
        return hash(tuple(group.id for group in self.groups))

    def groups_in(self) -> Iterator[_Stored]:
        return (_Stored(id=group.id, location=group.location) for group in self.groups)


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
    by_version: dict[int, list[GroupRow]] = {}
    for group in found:
        by_version.setdefault(group.policy_version or 0, []).append(group)
    return [
        EvaluationStep(number=version, groups=tuple(groups), path=plane)
        for version, groups in sorted(by_version.items())
    ]


def record_of(
    sample: Sample, *, step: int, index: int, rank: int = 0, version: int | None = None, kept: int | None = None
) -> Record:
    """Make the record of a sample, or of its first `kept` tokens, without loss terms. `version` is that of the policy
    its step was drawn for."""
    fields = place_fields(step, export_step=step, rank=rank, micro_step=index, index=index)
    seq_len = sample.num_tokens if kept is None else kept
    (batch,) = pack([sample], ranks=1, seq_len=seq_len, columns=tuple(sample.own.values())).ranks[0]
    copy = BatchCopy.of(batch, None)
    return next(copy.records(fields, version, untrained=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneStep(FrameStep):
    """A step that ranks received, as its plane has it."""

    logged: LoggedStep
    path: Path
    """The plane's folder."""
    run: str = ""

    @property
    def number(self) -> int:
        return self.logged.number

    @property
    def stamp(self) -> int:
        """Changes when the step was undone and made again, or planned again for another number of ranks."""
        return hash((self.logged.op, self.logged.manifest.digests))

    @property
    def version(self) -> int:
        return self.logged.manifest.policy_version

    @property
    def oldest_version(self) -> int:
        return self.logged.manifest.oldest_version

    def groups_in(self) -> Iterator[_Stored]:
        with reading(self.path) as log:
            groups = list(log.groups_of(self.logged.manifest.groups))
        firsts, ranks = accumulate((group.samples for group in groups), initial=0), self._ranks()
        for group, first in zip(groups, firsts, strict=False):
            yield _Stored(id=group.id, location=group.location, first=first, ranks=ranks)

    def _ranks(self) -> dict[int, int]:
        """Return the rank of each sample, while the plan is kept. A shared sample counts for its first rank."""
        found: dict[int, int] = {}
        for rank, need in enumerate(self.logged.manifest.needs):
            for sample in np.frombuffer(need, "<i4").tolist():
                found.setdefault(sample, rank)
        return found

    def point(self) -> dict[str, Any]:
        """Return its points on a run's curves, from the log alone."""
        manifest = self.logged.manifest
        low, total, high = manifest.staleness
        stale = manifest.num_versions
        return {
            "step": self.number,
            "tokens": manifest.tokens,
            "loss_tokens": manifest.loss_tokens,
            **{name: moments_of(manifest.summaries.numbers(name)) for name in ("reward", "length")},
            "staleness": {"count": stale, "mean": total / stale, "min": low, "max": high} if stale else None,
            "metrics": {},
        }


@dataclass(slots=True)
class PlaneSteps:
    """The steps of the plane in a folder. Steps read before are not read again."""

    folder: Path
    _known: list[LoggedStep] = field(default_factory=list)

    def all(self) -> list[PlaneStep]:
        """Return the steps that ranks received, oldest first, whether or not their frames are kept."""
        plane = plane_of(self.folder)
        if plane is None:
            return []
        try:
            found = logged_steps(plane, self._known)
        except CorruptFile as error:
            logger.warning("steps are not shown: %s", error)
            return []
        self._known = found
        return [PlaneStep(logged=step, path=plane) for step in found]

    def kept(self) -> list[PlaneStep]:
        """Return the steps whose frames are all kept."""
        return [step for step in self.all() if step.logged.is_kept]


# ------------------------------------------------------------------ groups that no rank trained on

MOST = 1000
"""Groups listed. Counts include all."""


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
            "state": one.state.name.lower(),
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
    found = {state_of(state).name.lower(): tokens / samples for state, tokens, samples in rows if samples}
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
