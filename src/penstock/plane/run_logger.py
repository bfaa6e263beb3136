"""What a plane's log tells of its run besides sessions: one line for each thing, the first time, and then counted.

Whatever others can cause without end (puts refused, messages that cannot be read, metric names) is bounded here: a line
the first time and at every tenfold, a number always.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from penstock.errors import Overloaded, PenstockError
from penstock.log import Log
from penstock.plane.engine import Engine
from penstock.plane.over_length import NONE, OverLength
from penstock.protocol import MAX_REASON

logger = logging.getLogger("penstock.plane")
MAX_METRICS = 1000
MAX_METRIC_NAME = 200
MAX_REASONS = 256
_WATCHED = {
    "groups_quarantined": "groups set aside because no step could be made with them: `penstock inspect` lists them",
    "runs_evicted": "runs evicted",
}

_ONCE = {
    "groups_untrained": "a group was accepted in which no token is trained, or none has logprobs",
    "priorities_unknown": "a rank reported priorities of ids that neither a group nor a sample of the step has",
}


class RunLogger:
    """Writes lines and counts; `counts` are those of the engine."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._seen = {name: counts[name] for name in _WATCHED}
        self._refused: Counter[str] = Counter()
        self._told: set[str] = set()
        """What is said once, and was."""
        self._shortened = 0
        """Groups of which samples were truncated or dropped."""
        self.stale_in_a_row = 0
        """Groups that came since the last one that was not too old."""

    def started(self, run: str, log: Log, engine: Engine) -> None:
        again = "started" if log.epoch == 1 else f"started again, epoch {log.epoch}"
        held = f"next step {engine.next_step}, {len(engine.run_tables)} groups held"
        logger.info("run %r (%s) %s: %s", run, log.run_id[:12], again, held)

    def count(self, name: str, text: str) -> None:
        """Something that may happen without end."""
        self._counts[name] += 1
        self._say(self._counts[name], text)

    def put(self, error: PenstockError | None, *, stale: bool, over_length: OverLength = NONE) -> None:
        """What became of a group."""
        if error is None:
            if over_length:
                self._say_shortened(over_length)
            self.stale_in_a_row = self.stale_in_a_row + 1 if stale else 0
            if stale:
                self._say(self.stale_in_a_row, "a group was too old for max_staleness and dropped")
            return
        kind = "no room" if isinstance(error, Overloaded) else "refused"
        self._refused[kind] += 1
        self._say(self._refused[kind], f"put: {kind}: {type(error).__name__}: {error}")

    def _say_shortened(self, over_length: OverLength) -> None:
        for name, count in asdict(over_length).items():
            self._counts[name] += count
        self._shortened += 1
        self._say(self._shortened, f"put: a group has samples longer than seq_len: {over_length}")

    def look(self) -> None:
        """Notice what the engine counted."""
        for name, words in _ONCE.items():
            if self._counts[name] and name not in self._told:
                self._told.add(name)
                logger.warning("%s; %s counts them", words, name)
        for name, words in _WATCHED.items():
            new = self._counts[name] - self._seen[name]
            if new > 0:
                self._seen[name] += new
                logger.warning("%d %s (%d so far)", new, words, self._seen[name])

    def metrics(self, reported: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
        """Those that may be kept: status must stay small whatever ranks report."""
        names = [name for name in reported if name in known or len(name) <= MAX_METRIC_NAME]
        room = MAX_METRICS - len(known)
        new = [name for name in names if name not in known][: max(room, 0)]
        kept = {name: reported[name] for name in names if name in known} | {name: reported[name] for name in new}
        if len(kept) < len(reported):
            lost = next(name for name in reported if name not in kept)
            limit = f"at most {MAX_METRICS} names of {MAX_METRIC_NAME} characters are kept"
            self.count("metrics_refused", f"metric {lost[:40]!r}: not kept; {limit}")
        return kept

    def discarded(self, reason: str, engine: Engine) -> str:
        """The reason that samples are counted under: the ledger must stay small whatever is sent."""
        known, reason = engine.ledger.discarded, reason[:MAX_METRIC_NAME]
        return reason if reason in known or len(known) < MAX_REASONS else "other reasons"

    def stale_words(self, engine: Engine) -> str:
        """For ranks that wait while everything that comes is too old."""
        if self.stale_in_a_row < 2:
            return ""
        return (
            f"the last {self.stale_in_a_row} groups that came were all dropped as stale: published is version "
            f"{engine.policy_version}, max_staleness {engine.settings.replay.max_staleness}"
        )

    def _say(self, count: int, text: str) -> None:
        text = text[:MAX_REASON]
        if count == 1:
            logger.warning("%s", text)
        elif str(count).rstrip("0") == "1":
            logger.warning("%s (%d so far)", text, count)
