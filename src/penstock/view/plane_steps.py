"""Steps of a run without token exports, read from its plane: the log for good, tokens while their frames are kept.

The log has a line for every step that ranks received and for every group in it. Frames are freed some steps after they
were trained (`retain`), so only the last steps can be opened. What a trainer computed is in no frame: log-probabilities
of the trainer, loss and masks need a `TokenExporter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import CorruptFile, PenstockError, UnknownKey
from penstock.log import GroupRow, reading
from penstock.runs import LoggedStep, logged_steps, stored_samples
from penstock.view.jsonl import encode_line
from penstock.view.plane_groups import FrameStep, logger, plane_of, record_of
from penstock.view.record import Record, Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneStep(FrameStep):
    """A step as its plane has it."""

    logged: LoggedStep
    path: Path
    """The plane's folder."""
    run: str = ""

    @property
    def number(self) -> int:
        return self.logged.number

    @property
    def stamp(self) -> int:
        """Changes when the step was undone and made again."""
        return self.logged.op

    def lines(self, skipped: Skipped) -> Iterator[tuple[Callable[[], bytes], Record]]:
        """Yield every record with a function that reads its line again."""
        with reading(self.path) as log:
            groups = list(log.groups_of(self.logged.manifest.groups))
        firsts = accumulate((group.samples for group in groups), initial=0)
        ranks = self._ranks()
        for group, first in zip(groups, firsts, strict=False):
            try:
                samples = stored_samples(self.path, group.id, group.location) if group.location else None
            except PenstockError as error:
                skipped.add(group.id, error)
                continue
            if samples is None:
                skipped.add(group.id, "its frame was freed")
                continue
            for i, sample in enumerate(samples):
                at = ranks.get(first + i, 0), first + i
                record = record_of(sample, step=self.number, index=at[1], rank=at[0], version=self._version)
                yield partial(self._line, group, i, at), record

    @property
    def _version(self) -> int:
        return self.logged.manifest.policy_version

    def _ranks(self) -> dict[int, int]:
        """Return the rank of each sample, while the plan is kept. A shared sample counts for its first rank."""
        found: dict[int, int] = {}
        for rank, need in enumerate(self.logged.manifest.needs):
            for sample in np.frombuffer(need, "<i4").tolist():
                found.setdefault(sample, rank)
        return found

    def _line(self, group: GroupRow, index: int, at: tuple[int, int]) -> bytes:
        try:
            samples = stored_samples(self.path, group.id, group.location)
        except PenstockError as error:
            raise UnknownKey(f"group {group.id!r}: its frame was freed: {error}") from None
        record = record_of(samples[index], step=self.number, index=at[1], rank=at[0], version=self._version)
        return encode_line(record)

    def point(self) -> dict[str, Any]:
        """Return its points on a run's curves, from the log alone."""
        manifest = self.logged.manifest
        low, total, high = manifest.staleness
        stale = manifest.num_versions
        return {
            "step": self.number,
            "tokens": manifest.tokens,
            "loss_tokens": manifest.loss_tokens,
            "reward": _moments(manifest.summaries.numbers("reward")),
            "length": _moments(manifest.summaries.numbers("length")),
            "staleness": {"count": stale, "mean": total / stale, "min": low, "max": high} if stale else None,
            "metrics": {},
        }


def _moments(values: list[float | None]) -> dict[str, float] | None:
    """Return count, mean and extremes over groups."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"count": len(known), "mean": sum(known) / len(known), "min": min(known), "max": max(known)}


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
