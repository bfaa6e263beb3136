"""A plane's counters, histograms of durations, metrics of new groups, log lines and status.

A plane that stalls for half a second costs every rank half a second, and nothing else shows it: processor time stays
low while a disk or a database is slow. So loop turns, log commits and storage writes are timed where they happen.
Everything here is bounded, because clients choose names and cause events.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import fsum, isfinite
from typing import TYPE_CHECKING, Any

from penstock.errors import Overloaded, PenstockError
from penstock.frames import GroupMetadata
from penstock.log import MAX_SHOWN, GroupRow, Log
from penstock.plane.intake import NONE, OverLength, int64s
from penstock.plane.manifest import GroupSummaries
from penstock.protocol import MAX_REASON, Admission, Coordinator

if TYPE_CHECKING:
    from penstock.plane.engine import Engine

COUNTS = {
    "groups": "groups accepted",
    "samples": "samples accepted",
    "tokens": "tokens accepted",
    "urls_signed": "URLs signed for workers that write to storage without credentials",
    "groups_direct": "groups that their worker wrote to storage itself",
    "groups_stale": "groups dropped at put because they were too old",
    "groups_untrained": "groups accepted in which nothing is trained",
    "groups_quarantined": "groups set aside because no step could be made with them",
    "groups_lost": "groups whose bytes storage no longer has",
    "truncated_samples": "samples cut to seq_len",
    "truncated_tokens": "tokens cut off",
    "dropped_samples": "samples dropped because they were longer than seq_len",
    "dropped_tokens": "tokens of these",
    "tokens_masked": "trained tokens left out of the loss because they were too old",
    "samples_masked": "samples with such tokens",
    "puts_repeated": "puts of a group that was accepted before",
    "puts_refused": "puts refused: the group, or its sender, is at fault",
    "puts_overloaded": "puts that found no room in time",
    "puts_failed": "puts that could not be written",
    "steps_replanned": "steps planned again because a group of theirs was damaged or lost",
    "steps_freeing_early": "committed steps forgotten before retain_steps to make room",
    "eval_groups_freeing_early": "evaluation groups forgotten to make room",
    "ranks_served_inline": "times a rank could not read storage that the plane could",
    "deletions_failed": "deletions that storage refused; they are tried again",
    "decisions_failed": "decisions that failed and were reported",
    "snapshots_skipped": "snapshots of state not written; a restart takes longer",
    "resumes_rewound": "trainers that resumed behind the newest step",
    "resumes_ahead": "trainers that resumed ahead of what was committed",
    "tenants_evicted": "tenants evicted",
    "messages_corrupt": "messages that could not be read",
    "messages_failed": "messages that could not be handled",
    "messages_foreign": "messages of another run",
    "metrics_refused": "reported metrics that were not kept",
    "reports_refused": "priorities that were refused",
    "priorities_unknown": "priorities of ids that the step does not have",
    "groups_awaited": "groups accepted that wait for columns",
    "groups_admitted": "groups that got their columns and may be trained",
    "groups_dropped_late": "groups dropped by a filter, an error or the deadline when they waited for columns",
    "groups_overdue": "groups that did not get their columns in time",
    "values_attached": "samples that got a late value",
    "values_known": "samples that had the value already",
    "values_late": "values of groups that were dropped or trained without",
    "leases_expired": "leases that ran out because their process was not heard",
    "prompts_expired": "prompts given up for an epoch because every lease on them ran out (max_expiries)",
    "tasks_late": "groups that were not kept because another had completed their task",
}
"""Counter -> meaning; a test holds that there are no others. `status()["counts"]` and the Prometheus page show every
counter from the start, zeros too: a counter that appears only with its first event would hide that event from
alerts."""


logger = logging.getLogger("penstock.plane")
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds of the buckets in seconds; one more bucket has no bound."""
SLOW_S = 0.1
_KEPT_SLOW = 32
"""Slow pieces of work that `status()` lists."""
WORK = ("turn", "commit", "write")
"""A turn of the loop, a transaction of the log, a write and sync of frames by the plane itself."""


@dataclass(slots=True)
class Histogram:
    """Counts durations by bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "total_s": self.total_s}


class Marks:
    """Records where a turn of the loop spends its time, for the log line of a slow turn."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float]] = []
        self._cpu_ns = 0

    def begin(self) -> None:
        self._marks = [("", time.perf_counter())]
        self._cpu_ns = time.thread_time_ns()

    def mark(self, part: str) -> None:
        """End a part of the turn."""
        self._marks.append((part, time.perf_counter()))

    def longest(self) -> str:
        """Return the longest part with its duration and the turn's processor time, or ""."""
        parts = [(at - before, part) for (_, before), (part, at) in pairwise(self._marks)]
        seconds, part = max(parts, default=(0.0, ""))
        # Processor time tells work from waiting: for a disk, a database, or a thread that holds the interpreter lock.
        cpu_ms = (time.thread_time_ns() - self._cpu_ns) / 1e6
        return f"{part} {seconds * 1000:.0f} ms, CPU {cpu_ms:.0f} ms" if part else ""


class Durations:
    """Histograms of a plane's work, and a list of the last slow pieces. `add` may be called from any thread."""

    def __init__(self) -> None:
        self._slow_s = SLOW_S
        self._lock = threading.Lock()
        self._histograms = {work: Histogram() for work in WORK}
        self._slow = dict.fromkeys(WORK, 0)
        self._last: deque[dict[str, Any]] = deque(maxlen=_KEPT_SLOW)

    def add(self, work: str, seconds: float, doing: str | Callable[[], str] = "") -> None:
        """Count a piece of work. `doing` describes it if it is slow."""
        with self._lock:
            found = self._histograms[work]
            found.counts[bisect_left(BOUNDS, seconds)] += 1
            found.total_s += seconds
            if seconds < self._slow_s:
                return
            self._slow[work] += 1
            count = self._slow[work]
            described = doing() if callable(doing) else doing
            self._last.append({"work": work, "at": time.time(), "seconds": seconds, "doing": described})
        # The first ten, then every power of ten: a slow disk would fill the log.
        if count <= 10 or str(count).rstrip("0") == "1":
            what = f", {described}" if described else ""
            logger.warning("slow %s: %.0f ms%s (%d so far)", work, seconds * 1000, what, count)

    def slow(self) -> dict[str, Any]:
        """Return how often each kind of work was slow and the last of it, oldest first, for `status()`."""
        with self._lock:
            return {"above_s": self._slow_s, "counts": dict(self._slow), "last": list(self._last)}

    def as_dict(self) -> dict[str, Any]:
        """Return the bucket bounds and the counts of each kind of work, for `status()`."""
        with self._lock:
            return {"bounds": list(BOUNDS), **{work: found.as_dict() for work, found in self._histograms.items()}}


_KEPT_STEPS = 64
"""Steps whose metrics are kept: more than are ever planned and not delivered."""


@lru_cache(maxsize=4)
def scored(rewards: bytes) -> tuple[float, int]:
    """Return the sum and the number of a group's finite rewards. Cached: a put asks twice."""
    found = [one for one in memoryview(rewards).cast("f") if isfinite(one)]
    return fsum(found), len(found)


class Generated:
    """Means of reward, length and truncation over groups accepted since the last planned step.

    With replay, `train/reward` averages old groups and new ones. These metrics cover new groups only. They are not in
    the log: a restarted plane starts from zero."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._sums: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._of_step: dict[int, dict[str, float]] = {}

    def add(self, metadata: GroupMetadata) -> None:
        """Count a group that was accepted for training."""
        count = len(metadata.ids)
        # Python's own sums: for sixteen samples numpy's take ten times as long.
        found = [("reward", *scored(metadata.rewards))] if metadata.rewards else []
        found += [
            ("length", float(sum(int64s(metadata.lengths))), count),
            ("completion_length", float(sum(int64s(metadata.loss_tokens))), count),
            ("truncated", float(len(metadata.truncated) - metadata.truncated.count(0)), count),
        ]
        if metadata.seconds:
            seconds = [one for one in metadata.seconds if one >= 0]
            found.append(("seconds", sum(seconds), len(seconds)))
        for name, total, number in found:
            if number:
                self._open[name] += number
                self._sums[name] = self._sums.get(name, 0.0) + total

    def close(self, step: int, buffer: Mapping[str, float], bias: dict[str, float]) -> None:
        """Close the interval of a planned step, with the metrics of the tables and of the bias at that moment."""
        self._last = self._means()
        names = ("buffer/items", "buffer/staleness_mean", "buffer/staleness_max")
        self._of_step[step] = self._last | {name: buffer[name] for name in names} | bias
        while len(self._of_step) > _KEPT_STEPS:
            del self._of_step[next(iter(self._of_step))]
        self._open, self._sums = Counter(), {}

    def of_step(self, step: int) -> dict[str, float]:
        """Return the metrics of a step's interval; empty for a step that an earlier plane planned."""
        return self._of_step.get(step, {})

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last interval, or of the current one before the first step."""
        return self._last or self._means()

    def _means(self) -> dict[str, float]:
        if not self._open:
            return {"gen/samples": 0}
        means = {f"gen/{name}": self._sums[name] / count for name, count in self._open.items()}
        # Two producers may report 1e308 seconds each, and the sum is infinite: leave that out.
        return {"gen/samples": self._open["length"]} | {n: mean for n, mean in means.items() if isfinite(mean)}


class Bias:
    """Mean length and reward of everything that was put, and of everything that steps train, since the run began.

    What is dropped as stale or trained late differs between the two: a policy that favours short answers shows here."""

    def __init__(self, sums: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.sums = dict(sums or {})
        """Name of a mean -> sum and weight."""

    def put(self, row: GroupRow, rewards: bytes) -> None:
        """Count a group that was accepted for training. `rewards` are those of its samples, as metadata has them."""
        if rewards:
            # The log keeps the rewards of the first samples of a group. A restart must count the same.
            self._add("gen/reward_mean", *scored(rewards[: 4 * MAX_SHOWN]))
        self._add("gen/length_mean", float(row.tokens), row.samples)

    def put_before(self, log: Log, rows: Iterable[GroupRow]) -> None:
        """Count groups of the log that are no longer in the snapshot's figures."""
        by_op = {row.op: row for row in rows}
        summaries = log.summaries(list(by_op))
        for op, row in by_op.items():
            self.put(row, summaries[op].rewards if op in summaries else b"")

    def planned(self, summaries: GroupSummaries, samples: Sequence[int]) -> None:
        """Count the groups of a planned step, with the number of samples of each."""
        for name in ("length", "reward"):
            for value, count in zip(summaries.numbers(name), samples, strict=False):
                if value is not None:
                    self._add(f"train/{name}_mean", value * count, count)

    def _add(self, name: str, total: float, weight: float) -> None:
        if weight > 0 and isfinite(total):
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (before[0] + total, before[1] + weight)

    def metrics(self) -> dict[str, float]:
        """Return the means, and how far what is trained deviates: relative for lengths, absolute for rewards."""
        found = {name: total / weight for name, (total, weight) in self.sums.items()}
        if found.get("gen/length_mean") and "train/length_mean" in found:
            found["train/length_bias"] = found["train/length_mean"] / found["gen/length_mean"] - 1
        if "gen/reward_mean" in found and "train/reward_mean" in found:
            found["train/reward_bias"] = found["train/reward_mean"] - found["gen/reward_mean"]
        return {name: value for name, value in found.items() if isfinite(value)}


MAX_METRICS = 1000
MAX_METRIC_NAME = 200
MAX_REASONS = 256
_WATCHED = {
    "groups_overdue": "groups did not get their columns in time (needs_deadline_s)",
    "groups_quarantined": "groups set aside because no step could be made with them: `penstock inspect` lists them",
    "tenants_evicted": "tenants evicted",
}

_ONCE = {
    "groups_untrained": "a group was accepted in which no token is trained, or none has logprobs",
    "tokens_masked": "a step has trained tokens older than max_token_staleness, which are left out of the loss",
    "priorities_unknown": "a rank reported priorities of ids that neither a group nor a sample of the step has",
}


class RunLogger:
    """Writes the plane's log lines, and counts. `counts` are the engine's.

    Clients can cause some events without limit: rejected puts, unreadable messages, new metric names. These get a line
    the first time and at every power of ten, and are always counted."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._seen = {name: counts[name] for name in _WATCHED}
        self._refused: Counter[str] = Counter()
        self._logged: set[str] = set()
        """Names of `_ONCE` that were logged."""
        self._shortened = 0
        """Groups with truncated or dropped samples."""
        self.stale_in_a_row = 0
        """Stale groups since the last fresh one."""

    def started(self, run: str, log: Log, engine: Engine) -> None:
        again = "started" if log.epoch == 1 else f"started again, epoch {log.epoch}"
        held = f"next step {engine.next_step}, {len(engine.tenant_tables)} groups held"
        logger.info("run %r (%s) %s: %s", run, log.run_id[:12], again, held)

    def count(self, name: str, text: str) -> None:
        """Count an event that clients can cause without limit."""
        self._counts[name] += 1
        self._say(self._counts[name], text)

    def put(self, error: PenstockError | None, *, stale: bool, over_length: OverLength = NONE) -> None:
        """Log the result of a put."""
        if error is None:
            if over_length is not NONE and over_length:
                self._say_shortened(over_length)
            self.stale_in_a_row = self.stale_in_a_row + 1 if stale else 0
            if stale:
                self._say(self.stale_in_a_row, "a group was staler than max_staleness and dropped")
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
        """Log what the engine counted since the last call."""
        for name, text in _ONCE.items():
            if self._counts[name] and name not in self._logged:
                self._logged.add(name)
                logger.warning("%s; %s counts them", text, name)
        for name, text in _WATCHED.items():
            new = self._counts[name] - self._seen[name]
            if new > 0:
                self._seen[name] += new
                logger.warning("%d %s (%d so far)", new, text, self._seen[name])

    def metrics(self, reported: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics to keep. Their number is bounded, so that the status stays small."""
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
        """Return the reason to count discarded samples under. Their number is bounded, so that the ledger stays
        small."""
        known, reason = engine.ledger.discarded, reason[:MAX_METRIC_NAME]
        return reason if reason in known or len(known) < MAX_REASONS else "other reasons"

    def stale_remark(self, engine: Engine) -> str:
        """Return a remark for ranks that wait while every new group is stale, or ""."""
        if self.stale_in_a_row < 2:
            return ""
        return (
            f"the last {self.stale_in_a_row} groups that arrived were all dropped as stale: policy version "
            f"{engine.policy_version} is published, max_staleness {engine.settings.replay.max_staleness}"
        )

    def _say(self, count: int, text: str) -> None:
        text = text[:MAX_REASON]
        if count == 1:
            logger.warning("%s", text)
        elif str(count).rstrip("0") == "1":
            logger.warning("%s (%d so far)", text, count)


def status_of(engine: Engine, coordinator: Coordinator, admission: Admission) -> dict[str, Any]:
    """Return what `penstock top` and `plane.status()` show: plain values of bounded size."""
    settings = engine.settings
    return {
        "run": settings.run,
        "run_id": engine.log.run_id,
        "folder": None if engine.log.folder is None else str(engine.log.folder.resolve()),
        "log": engine.log.where,
        "host": socket.gethostname(),
        "ranks": settings.packing.ranks,
        "columns": {name: column.described() for name, column in settings.packing.own.items()},
        "epoch": coordinator.epoch,
        "session": coordinator.session,
        "phase": coordinator.phase.value,
        "waiting_for": coordinator.waits_for(time.monotonic()),
        "missing": [list(place) for place in coordinator.missing],
        "next_step": engine.next_step,
        "last_step": engine.last_step,
        "policy_version": engine.policy_version,
        "producers_waiting": admission.rooms.num_waiting,
        "oldest_wait_s": admission.rooms.oldest_s,
        "retain": "all" if engine.recorder.keeps_all else "steps",
        "held_groups": len(engine.tenant_tables),
        "held_bytes": engine.held_bytes,
        "max_disk_bytes": settings.max_disk_bytes,
        "max_held_bytes": settings.max_held_bytes,
        "ledger": engine.ledger.as_dict(),
        "quarantine": engine.quarantine(),
        "counts": dict(engine.counts),
        "durations": engine.durations.as_dict(),
        "slow": engine.durations.slow(),
        "metrics": engine.tenant_tables.metrics()
        | engine.acceptance.generated.metrics()
        | engine.state.bias.metrics()
        | engine.state.evaluations.metrics(),
        "reported": engine.numbers,
        "tenants": {} if settings.env_weights else engine.tenants(),
        "envs": engine.tenants() if settings.env_weights else {},
        "storage": engine.segments.status(),
    }
