"""The phases of a session, and what leads from one to another; docs/delivery.md draws this table."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    FORMING = "forming"
    RUNNING = "running"
    FAILED = "failed"


TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    (Phase.FORMING, "hello"): Phase.FORMING,
    (Phase.FORMING, "last hello"): Phase.RUNNING,
    (Phase.FORMING, "fail"): Phase.FAILED,
    (Phase.FORMING, "mismatch"): Phase.FAILED,
    (Phase.FORMING, "silence"): Phase.FORMING,
    (Phase.FORMING, "not back after a restart of the plane"): Phase.FAILED,
    (Phase.RUNNING, "request, received, commit, report"): Phase.RUNNING,
    (Phase.RUNNING, "fail"): Phase.FAILED,
    (Phase.RUNNING, "silence"): Phase.FAILED,
    (Phase.RUNNING, "mismatch"): Phase.FAILED,
    (Phase.RUNNING, "a process restarted"): Phase.FAILED,
    (Phase.RUNNING, "everybody left"): Phase.FORMING,
    (Phase.FAILED, "fresh hello"): Phase.FORMING,
}
