"""Counts what a producer should know about its puts, and warns at the first, second, fourth, eighth, ... time."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque

from penstock.convert import RETOKENIZED, Group
from penstock.protocol import OVER_LENGTH, over_length_text

logger = logging.getLogger("penstock.producer")


class PutCounts:
    """Counts of one producer. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.stale = 0
        """Groups dropped at once, because they were too old for `max_staleness`."""
        self.branches: Counter[str] = Counter()
        """How often rollouts branched, by cause: see `penstock.convert.branching`."""
        self.unrouted = 0
        """Samples without routed experts although the server reported some."""
        self.late: deque[str] = deque(maxlen=4096)
        """Ids of the last groups that were not kept: another worker had completed their task, or its prompt was
        removed."""
        self.num_late = 0
        self.over_length: Counter[str] = Counter()
        """Samples longer than the plane's `seq_len`, and their tokens: truncated_samples, truncated_tokens,
        dropped_samples, dropped_tokens."""

    def __repr__(self) -> str:
        names = ("stale", "branches", "unrouted", "over_length", "num_late")
        shown = ", ".join(f"{name}={value}" for name in names if (value := getattr(self, name)))
        return f"PutCounts({shown})"

    def on_late(self, group: str) -> None:
        with self._lock:
            self.late.append(group)
            self.num_late += 1
            count = self.num_late
        if _should_warn(count - 1, count):
            logger.warning(
                "group %r was not kept: another worker had completed its task, or its prompt was removed; %d so far; "
                "raise lease_s if workers are often paused for longer",
                group,
                count,
            )

    def on_stale(self, group: str, version: int | None) -> None:
        with self._lock:
            self.stale += 1
            count = self.stale
        if _should_warn(count - 1, count):
            logger.warning(
                "group %r was too old for max_staleness and was dropped, %d groups so far; version %s is published: "
                "generate with newer weights (plane.policy_version), or raise max_staleness",
                group,
                count,
                version,
            )

    def on_over_length(self, group: str, counts: tuple[int, int, int, int]) -> None:
        with self._lock:
            before = self._num_shortened()
            self.over_length.update(dict(zip(OVER_LENGTH, counts, strict=True)))
            after = self._num_shortened()
        if _should_warn(before, after):
            logger.warning(
                "group %r has samples longer than the plane's seq_len; so far: %s; generate fewer tokens, or "
                "raise seq_len",
                group,
                over_length_text(self.over_length),
            )

    def _num_shortened(self) -> int:
        return self.over_length["truncated_samples"] + self.over_length["dropped_samples"]

    def on_put(self, group: Group) -> None:
        """Count how a group's rollouts were converted to samples."""
        if not group.branches and not group.unrouted:
            return
        with self._lock:
            before = self.branches[RETOKENIZED], self.unrouted
            self.branches.update(group.branches)
            self.unrouted += group.unrouted
            after = self.branches[RETOKENIZED], self.unrouted
        if _should_warn(before[0], after[0]):
            logger.warning(
                "group %r: the model's output came back as other tokens, %d times so far; each time the rollout "
                "branches and its history is stored and computed again: send token ids to the server, not text",
                group.id,
                after[0],
            )
        if _should_warn(before[1], after[1]):
            logger.warning(
                "group %r: routed experts left out of samples because rows were missing, %d samples so far; ask the "
                "server for the rows of every call",
                group.id,
                after[1],
            )


def _should_warn(before: int, after: int) -> bool:
    """Return whether a count passed a power of two, as 3 -> 5 passes 4 and 5 -> 7 passes none."""
    return after.bit_length() > before.bit_length()
