"""A pytest plugin: processes that run the tests, forked from the one that has imported them all.

    pytest --workers 6 tests

Importing the test modules takes half a minute of core time in a fresh clone. Here one process does it, and workers
share its memory. A worker takes one unit of tests after the other (`tests.support.schedule.unit_of`) and sends its
reports. A worker that dies fails the test that it ran; another worker runs the rest of its unit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

from tests.support.pace import workers_are_here
from tests.support.schedule import unit_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that run the tests, forked after collection")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run in workers what pytest would run here. A worker returns from this as well, when no tests are left."""
    count = session.config.getoption("workers")
    if count < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    # A worker's folder is inside that of this process, which is made before there are several.
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    line = _Crew(session, count).run()
    if line is not None:
        _Worker(session, line).run()
    return True


class _Member:
    """A worker, as the first process sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.given: deque[int] = deque()
        """Tests that it has not finished; it runs the first of them."""


class _Crew:
    """Forks workers, gives them units of tests, and passes their reports to pytest."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._count, self._forked = session, count, 0
        units: dict[str, list[int]] = {}
        for number, item in enumerate(session.items):
            units.setdefault(unit_of(item.nodeid), []).append(number)
        self._units = deque(units.values())
        self._members: dict[Connection, _Member] = {}

    def run(self) -> Connection | None:
        """Run all tests. In a worker, return its connection."""
        try:
            while self._members or self._units:
                while self._units and len(self._members) < self._count:
                    line = self._fork()
                    if line is not None:
                        return line
                self._listen()
        finally:
            for member in self._members.values():  # tests stop early
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGINT)
        return None

    def _fork(self) -> Connection | None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._forked += 1
        pid = os.fork()
        if pid:
            theirs.close()
            self._members[ours] = _Member(pid)
            return None
        for line in (ours, *self._members):
            line.close()
        self._members.clear()
        _become_worker(self._session.config, self._forked)
        return theirs

    def _listen(self) -> None:
        for line in wait(list(self._members)):
            assert isinstance(line, Connection)
            member = self._members[line]
            try:
                kind, *more = json.loads(line.recv_bytes())
            except (EOFError, ConnectionResetError):
                self._end(line, member)
                continue
            if kind == "next":
                unit = self._units.popleft() if self._units else []
                member.given.extend(unit)
                line.send_bytes(json.dumps(unit).encode())
            elif kind == "done":
                member.given.popleft()
            else:
                self._report(more[0])
            if self._session.shouldfail:
                raise self._session.Failed(self._session.shouldfail)

    def _report(self, report: dict[str, Any]) -> None:
        hook, config = self._session.config.hook, self._session.config
        hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=config, data=report))

    def _end(self, line: Connection, member: _Member) -> None:
        """Fail the test that a dead worker ran."""
        line.close()
        del self._members[line]
        code = os.waitstatus_to_exitcode(os.waitpid(member.pid, 0)[1])
        if not member.given:
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                raise RuntimeError(f"a worker ended with {code} after its last test; see what it printed above")
            return
        item = self._session.items[member.given.popleft()]
        if member.given:
            self._units.appendleft(list(member.given))
        words = f"the worker ended with {code} while it ran this test"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)


def _become_worker(config: Any, number: int) -> None:
    """Leave what belongs to the first process alone: its output, folders and random numbers."""
    plugins, folders = config.pluginmanager, config._tmp_path_factory
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # in files of its own
    capture.suspend_global_capture()
    reporter = plugins.getplugin("terminalreporter")
    plugins.unregister(reporter)
    plugins.register(_Quiet(reporter._tw), "terminalreporter")
    folders._basetemp = folders._basetemp / f"worker-{number}"
    folders._basetemp.mkdir(mode=0o700)
    folders._exit_stack = ExitStack()
    random.seed()
    workers_are_here()


class _Quiet:
    """Stands for the reporter in a worker. Its writer is there for what a timeout says."""

    def __init__(self, writer: Any) -> None:
        self._tw = writer


class _Worker:
    """Runs the units that it is given. Asks for the next before the last test of one, which leaves fixtures to it."""

    def __init__(self, session: pytest.Session, line: Connection) -> None:
        self._session, self._line = session, line
        session.config.pluginmanager.register(self)

    def run(self) -> None:
        tests = self._tests()
        item = next(tests, None)
        while item is not None:
            following = next(tests, None)
            self._session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._send("done")
            item = following

    def _tests(self) -> Iterator[pytest.Item]:
        while unit := self._ask():
            for number in unit:
                yield self._session.items[number]

    def _ask(self) -> list[int]:
        self._send("next")
        unit: list[int] = json.loads(self._line.recv_bytes())
        return unit

    def _send(self, *message: object) -> None:
        self._line.send_bytes(json.dumps(message, default=str).encode())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        self._send("report", config.hook.pytest_report_to_serializable(config=config, report=report))
