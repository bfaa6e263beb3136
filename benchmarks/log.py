"""The decision log: commits of accepted groups, and the restart of a plane that holds many, in SQLite and PostgreSQL.

Logs take turns on one disk, with the rows and metadata that a plane writes. The PostgreSQL server is one of its own, on
this host, with its defaults. For a restart one process fills a log through the engine and is killed; another opens it
and rebuilds its memory. Filling waits for no sync: a process that is killed loses nothing by that, only a power cut
would. As a program, `python -m benchmarks.log fill|restart ...`, this module is either of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks import ROOT
from benchmarks.metadata_only import make_metadata
from benchmarks.programs.plane import SEQ_LEN
from benchmarks.report import Row, skipped
from penstock.errors import PenstockError
from penstock.frames import GroupMetadata
from penstock.log import GroupRow, Log, PostgresLog, SqliteLog
from penstock.packing import Packing
from penstock.plane.engine import Drawn, Engine
from penstock.plane.intake import Incoming
from penstock.plane.opening import open_log, storage_of
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.plane.step_builder import PlannedStep, StepBuilder

_PER_COMMIT = 8
_HELD, _STEPS = 100_000, 10_000
_BYTES = 100_000
"""Of a frame."""
_P99_MS, _RESTART_S = 10.0, {"SQLite": 4.0, "PostgreSQL": 6.0}
Progress = Callable[[str], None]


def run(
    *,
    full: bool = False,
    progress: Progress = lambda _: None,
    commits: int | None = None,
    held: int = _HELD,
    steps: int | None = None,
) -> list[Row]:
    """`commits`, `held` and `steps` are for tests."""
    commits, steps = commits or (2000 if full else 500), steps or _STEPS
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="penstock-log-")))
        addresses: dict[str, str | None] = {"SQLite": None}
        missing = ""
        progress("starting PostgreSQL")
        try:
            from tests.support.postgres_server import PostgresServer

            addresses["PostgreSQL"] = opened.enter_context(PostgresServer()).url
        except (ImportError, PenstockError) as error:
            missing = f"no PostgreSQL: {error}"
        rows = _commits(folder, addresses, commits, progress)
        progress(f"a run of {steps:,} steps")
        last = max(steps // 100, 1)
        _fill(folder / "run", None, held + 4 * last, steps - last)
        for name, address in addresses.items():
            progress(f"{name}: the last steps, and a restart")
            rows.append(_restart(folder, name, address, last))
    return rows if not missing else [*rows, skipped("PostgreSQL, commit of 8 groups, p99", missing)]


def settings_of(address: str | None, run: str) -> PlaneSettings:
    return PlaneSettings(
        packing=Packing(ranks=1, seq_len=SEQ_LEN),
        target=Target(groups=4),
        max_held_bytes=1 << 50,
        replay=Replay(capacity=1 << 20),
        log=address,
        run=run,
    )


# ------------------------------------------------------------------ commits


def _commits(folder: Path, addresses: dict[str, str | None], count: int, progress: Progress) -> list[Row]:
    """Both logs take turns, commit by commit."""
    rows = []
    metadata = make_metadata(_PER_COMMIT)[0].to_bytes()
    with ExitStack() as opened:
        logs = {
            name: opened.enter_context(_opened(folder / name, settings_of(address, "commits")))
            for name, address in addresses.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in logs}
        for number in range(count):
            if number % 100 == 0:
                progress(f"commit {number} of {count}")
            for name, log in logs.items():
                taken[name].append(_commit(log, number * _PER_COMMIT + 1, metadata))
    for name, seconds in taken.items():
        ms: NDArray[np.float64] = np.array(seconds[count // 10 :]) * 1e3
        p50, p99 = np.percentile(ms, [50, 99])
        rate = _PER_COMMIT / float(np.mean(ms)) * 1e3
        target = _P99_MS if name == "PostgreSQL" else None
        title = f"{name}, commit of 8 groups"
        rows.append(Row(name=f"{title}, p50", ours=float(p50), unit="ms"))
        rows.append(Row(name=f"{title}, p99", ours=float(p99), unit="ms", target=target, bound="max"))
        rows.append(Row(name=f"{name}, groups per second, 8 a commit", ours=rate, unit="groups/s"))
    return rows


def _commit(log: Log, op: int, metadata: bytes) -> float:
    rows = []
    for n in range(op, op + _PER_COMMIT):
        place, digest = f"{'0' * 16}:{n}:{_BYTES}", n.to_bytes(16, "big")
        rows.append((GroupRow(n, f"group-{n}", digest, 3, 16, 65_536, _BYTES, location=place), metadata))
    begin = time.perf_counter()
    with log.transaction():
        log.add_groups(rows)
    return time.perf_counter() - begin


@contextmanager
def _opened(folder: Path, settings: PlaneSettings) -> Iterator[Log]:
    log = open_log(folder, settings)
    try:
        yield log
    finally:
        log.close()


# ------------------------------------------------------------------ restarts


def _fill(folder: Path, address: str | None, held: int, steps: int) -> None:
    done = _program("fill", str(folder), address or "", str(held), str(steps))
    _set_sync(None, address, wanted=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def _restart(folder: Path, name: str, address: str | None, last: int) -> Row:
    """Copy the run, train its last steps there, kill the plane and start another one.

    PostgreSQL would be a round trip for each of the 40,000 transactions of a long run: many minutes on a busy machine.
    """
    own = folder / f"restart-{name}"
    if address is None:
        shutil.copytree(folder / "run", own)
    else:
        copy_log(folder / "run", own, address)
    _fill(own, address, 0, last)
    found = json.loads(_program("restart", str(own), address or "").stdout)
    title = f"{name}, restart after kill -9, {found['held']:,} held groups, {found['steps']:,} committed steps"
    note = f"CPU {found['cpu_s']:.2f} s; from opening the log to an engine that could serve"
    return Row(name=title, ours=found["seconds"], unit="s", target=_RESTART_S[name], bound="max", note=note)


def copy_log(source: Path, target: Path, address: str) -> None:
    """Copy a SQLite log that no plane has open, and its storage, to PostgreSQL: the tables are the same."""
    import psycopg

    from penstock.log.log_rows import TABLES
    from penstock.log.postgres_address import schema_of

    settings = settings_of(address, "restart")
    log = open_log(target, settings)
    assert isinstance(log, PostgresLog)
    with closing(sqlite3.connect(source / "log.sqlite")) as had, psycopg.connect(address) as connection:
        connection.execute(f'SET search_path TO "{schema_of(settings.run)}"')
        for table, columns in TABLES.items():
            connection.execute(f"TRUNCATE {table}")
            names, as_text = ", ".join(columns), [kind in ("text", "any") for kind in columns.values()]
            with connection.cursor().copy(f"COPY {table} ({names}) FROM STDIN") as copy:
                for row in had.execute(f"SELECT {names} FROM {table}"):  # noqa: S608 - our own names
                    copy.write_row([str(one) if text else one for one, text in zip(row, as_text, strict=True)])
        for name in ("format", "run_id", "epoch", "commits"):  # in a table of their own
            connection.execute("DELETE FROM meta WHERE name = %s", (name,))
        meta = dict(had.execute("SELECT name, value FROM meta"))
    log.move_past(meta["run_id"], epoch=int(meta["epoch"]), commits=int(meta["commits"]))
    log.close()
    shutil.rmtree(target / "storage", ignore_errors=True)
    shutil.copytree(source / "storage", target / "storage")


def _set_sync(log: Log | None, address: str | None, *, wanted: bool) -> None:
    """Have the database wait for its disk or not. After a plane has connected: it refuses a server that does not."""
    if isinstance(log, SqliteLog):
        log.rows(f"PRAGMA synchronous={'FULL' if wanted else 'OFF'}")
    if address is None:
        return
    import psycopg

    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET fsync = {'on' if wanted else 'off'}")
        connection.execute("SELECT pg_reload_conf()")
        if wanted:
            connection.execute("CHECKPOINT")


def _program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.log", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


class EngineRun:
    """A plane's engine and log, and what producers and ranks would have them do: groups accepted, steps trained."""

    def __init__(self, folder: Path, settings: PlaneSettings, *, synced: bool = True) -> None:
        self.log = open_log(folder, settings)
        if not synced:
            _set_sync(self.log, settings.log, wanted=False)
        self.engine = Engine(settings, self.log, storage_of(settings, folder))
        self._builder = StepBuilder(settings.packing, self.engine.storage)
        self._made = make_metadata(8)
        self._per_step = settings.target.amount
        (self._segment,) = self.engine.segments.register("bench")
        self._plans: dict[int, PlannedStep] = {}
        self._count = sum(1 for _ in self.log.groups())
        self._step = self.engine.last_step

    def accept(self, groups: int) -> None:
        """Accept groups whose frames were written by somebody else, with one transaction."""
        engine = self.engine
        for number in range(self._count, self._count + groups):
            ids = tuple(f"g{number}/{i}" for i in range(16))
            one = msgspec.structs.replace(self._made[number % 8], group=f"g{number}", ids=ids)
            location = f"{self._segment}:{number * _BYTES}:{_BYTES}"
            engine.segments.expect(location, "bench")
            group = Incoming(
                id=one.group, digest=one.digests[0], size=_BYTES, tickets=[number], location=location, metadata=one
            )
            assert engine.acceptance.offer(group) is True
            engine.acceptance.arrive(group)
        self._count += groups
        assert all(outcome.error is None for outcome in engine.acceptance.flush())

    def train(self) -> None:
        """Draw, plan, record, deliver and commit a step."""
        self._step += 1
        drawn = self.engine.draw_step(self._step)
        assert isinstance(drawn, Drawn), drawn
        at = int(drawn.groups[0].group[1:]) % 8
        if at not in self._plans:  # every eighth group has the same lengths
            self._plans[at] = self._builder.plan([GroupMetadata.from_bytes(data) for data in drawn.metadata])
        self.engine.record(drawn, self._plans[at])
        self.engine.received(self._step)
        self.engine.commit(self._step, None)


def fill(folder: Path, settings: PlaneSettings, held: int, steps: int) -> None:
    """Accept groups and train steps as a plane does, and be killed in the middle of it."""
    run = EngineRun(folder, settings, synced=False)
    for _ in range(steps):
        if held:  # else it continues a run, and trains what that holds
            run.accept(4)
        run.train()
    for at in range(0, held, 500):
        run.accept(min(500, held - at))
    os.kill(os.getpid(), signal.SIGKILL)


def restart(folder: Path, settings: PlaneSettings) -> dict[str, float]:
    """Seconds until a plane could serve."""
    begin, cpu = time.perf_counter(), time.process_time_ns()
    log = open_log(folder, settings)
    engine = Engine(settings, log, storage_of(settings, folder))
    found = {"seconds": time.perf_counter() - begin, "held": len(engine.tenant_tables), "steps": engine.next_step - 1}
    found["cpu_s"] = (time.process_time_ns() - cpu) / 1e9
    log.close()
    return found


if __name__ == "__main__":
    where, plane = Path(sys.argv[2]), settings_of(sys.argv[3] or None, "restart")
    if sys.argv[1] == "fill":
        fill(where, plane, int(sys.argv[4]), int(sys.argv[5]))
    else:
        print(json.dumps(restart(where, plane)))
