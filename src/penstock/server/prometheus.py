"""A plane's metrics in Prometheus format, rendered by prometheus_client.

The second part of a name tells what it is about: `penstock_gen_` what was generated, `penstock_buffer_` what waits,
`penstock_train_` what was trained on, `penstock_eval_` what was evaluated, `penstock_ledger_` where every sample is,
`penstock_tenant_` the tenants that share the trainer, `penstock_plane_` the plane itself.
The plane's loop takes all numbers between two turns, so they are consistent. A plane that does not answer within two
seconds gives 503, which is worth an alarm.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Any

from penstock.errors import WaitTimeout
from penstock.extras import require
from penstock.log import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SIDES = {
    "gen": "what was generated",
    "buffer": "what waits to be trained",
    "train": "what was trained on",
    "eval": "what was evaluated",
    "ledger": "where every accepted sample is",
    "tenant": "the tenants that share the trainer",
    "plane": "the plane itself",
    "storage": "where frames are",
    "perf": "how fast",
}
"""HELP texts by the second part of a metric's name."""
_ODD = re.compile(r"[^a-zA-Z0-9_]")
_TOTALS = {
    "gen/items", "gen/tokens", "gen/bytes", "gen/refused_stale", "gen/wait_s", "buffer/evicted_unsampled",
    "train/items", "train/batches", "train/tokens", "train/first_uses", "train/filled", "train/wait_s",
    "train/priority_updates", "train/priority_updates_stale",
}  # fmt: skip
"""The table's metrics that only grow while the plane runs."""
_STATES = [state.name.lower() for state in State if state is not State.DROPPED]
_PHASES = ("forming", "rejoining", "running", "failed")
_ASK_S = 2.0
_DURATION = "penstock_plane_duration_seconds"

Point = tuple[str, str, dict[str, str], float]
"""(name, type, labels, value)."""


class Snapshot:
    """Lets any thread ask for the plane's status. The plane's loop answers between two turns."""

    def __init__(self, take: Callable[[], dict[str, Any]]) -> None:
        self._take = take
        self._asked = threading.Event()
        self._answered = threading.Condition()
        self._turn = 0
        self._found: dict[str, Any] = {}

    def on_turn(self) -> None:
        """Answer a waiting thread, if there is one. Called by the loop."""
        if self._asked.is_set():
            self._asked.clear()  # before taking, so that a question which arrives meanwhile is not lost
            found = self._take()
            with self._answered:
                self._turn, self._found = self._turn + 1, found
                self._answered.notify_all()

    def ask(self, timeout_s: float = _ASK_S) -> dict[str, Any]:
        with self._answered:
            before = self._turn
            self._asked.set()
            if not self._answered.wait_for(lambda: self._turn > before, timeout_s):
                raise WaitTimeout(f"the plane's loop did not answer within {timeout_s:g} s")
            return self._found


def render(status: dict[str, Any]) -> str:
    """Return a plane's status in Prometheus text format."""
    return expose(_points(status), run=status["run"], durations=status["durations"])


def expose(points: Iterable[Point], *, run: str, durations: dict[str, Any] | None = None) -> str:
    """Return points in Prometheus text format, each with the label `run`. Points of one name have the same labels.
    `durations` is the result of `Durations.as_dict`."""
    require("a page for Prometheus", "prometheus_client")
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, Any] = {}
    for name, kind, labels, value in points:
        name = _ODD.sub("_", name)
        if name not in families:
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            about = _SIDES.get(name.split("_")[1], "")
            families[name] = family(name, about, labels=["run", *labels])
        families[name].add_metric([run, *labels.values()], value)
    if durations is not None:
        families[_DURATION] = _histograms(run, durations)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected([families[name] for name in sorted(families)]))
    text: bytes = generate_latest(registry)
    return text.decode()


def _histograms(run: str, durations: dict[str, Any]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    about = "how long a turn of the loop, a log commit, a write of frames takes"
    family = HistogramMetricFamily(_DURATION, about, labels=["run", "work"])
    bounds = [*map(str, durations["bounds"]), "+Inf"]
    for work, found in durations.items():
        if work != "bounds":
            # Prometheus buckets are cumulative: counts [3, 2, 1] become 3, 5, 6.
            totals = accumulate(found["counts"])
            family.add_metric([run, work], list(zip(bounds, totals, strict=True)), found["total_s"])
    return family


def _free_bytes(status: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the free bytes of the volumes under log and storage, if these are folders. Runs on the page's thread,
    because a network filesystem that hangs must not stop the plane's loop."""
    url = status["storage"]["url"]
    storage = url.removeprefix("file://") if url.startswith("file://") else None
    for volume, folder in (("log", status["folder"]), ("storage", storage)):
        if folder is not None:
            with suppress(OSError):
                yield volume, shutil.disk_usage(folder).free


class _Collected:
    """A collector that returns ready-made metric families."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _ledger_points(ledger: dict[str, Any]) -> Iterator[Point]:
    yield "penstock_ledger_accepted_samples_total", "counter", {}, ledger["accepted"]
    yield "penstock_ledger_uses_total", "counter", {}, ledger["uses"]
    yield "penstock_ledger_balanced", "gauge", {}, float(ledger["balanced"])
    for state in _STATES:
        yield "penstock_ledger_samples", "gauge", {"state": state}, ledger[state]
    for name in ("dropped", "discarded"):
        for reason, count in ledger[name].items():
            yield f"penstock_ledger_{name}_samples_total", "counter", {"reason": reason}, count
    for name, count in ledger["over_length"].items():
        action, _, unit = name.partition("_")
        yield f"penstock_ledger_over_length_{unit}_total", "counter", {"action": action}, count
    for name, count in ledger["masked"].items():
        yield f"penstock_ledger_masked_{name}_total", "counter", {}, count


def _points(status: dict[str, Any]) -> Iterator[Point]:
    for path, value in status["metrics"].items():
        side, _, name = path.partition("/")
        what, _, label = name.partition("/")
        if side == "eval" and label:
            yield f"penstock_eval_{what}", "gauge", {"env": label}, value
        elif label:
            yield f"penstock_{side}_{what}_total", "counter", {"reason": label}, value
        elif path in _TOTALS:
            yield f"penstock_{side}_{what}_total", "counter", {}, value
        else:
            yield f"penstock_{side}_{what}", "gauge", {}, value
    yield from _ledger_points(status["ledger"])
    for kind, count in status["counts"].items():
        yield "penstock_plane_events_total", "counter", {"kind": kind}, count
    for tenant, found in status["tenants"].items():
        labels = {"tenant": tenant}
        yield "penstock_tenant_share", "gauge", labels, found["share"]
        yield "penstock_tenant_held_groups", "gauge", labels, found["held_groups"]
        yield "penstock_tenant_held_bytes", "gauge", labels, found["held_bytes"]
        yield "penstock_tenant_taken_tokens_total", "counter", labels, found["taken_tokens"]
        yield "penstock_tenant_evicted", "gauge", labels, float(found["evicted"] is not None)
    yield "penstock_plane_producers_waiting", "gauge", {}, status["producers_waiting"]
    yield "penstock_plane_oldest_wait_s", "gauge", {}, status["oldest_wait_s"]
    for phase in _PHASES:
        yield "penstock_plane_phase", "gauge", {"phase": phase}, float(status["phase"] == phase)
    yield "penstock_plane_missing_processes", "gauge", {}, len(status["missing"])
    for name in ("epoch", "session", "next_step", "last_step", "policy_version", "uptime_s", "max_held_bytes"):
        yield f"penstock_plane_{name}", "gauge", {}, status[name]
    for name in ("live_bytes", "dead_bytes", "segments", "writers", "to_delete"):
        yield f"penstock_storage_{name}", "gauge", {}, status["storage"][name]
    for name in ("unregistered", "missing"):
        yield f"penstock_storage_{name}_segments", "gauge", {}, len(status["storage"][name])
    for volume, free in _free_bytes(status):
        yield "penstock_storage_free_bytes", "gauge", {"volume": volume}, free
    if status["max_disk_bytes"] is not None:
        yield "penstock_storage_quota_bytes", "gauge", {}, status["max_disk_bytes"]
    yield "penstock_plane_held_bytes", "gauge", {}, status["held_bytes"]
    yield "penstock_plane_held_groups", "gauge", {}, status["held_groups"]
