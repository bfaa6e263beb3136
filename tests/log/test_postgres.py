"""A log in PostgreSQL: what it refuses, whom it fences, what it shows to nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import ConfigError, Conflict, CorruptFile, Fenced, LogAway
from penstock.log.postgres_address import redacted, schema_of
from penstock.log.postgres_log import PostgresLog
from penstock.plane.settings import server_settings
from penstock.runs.recorded_run import RecordedRun
from penstock.runs.run_copy import RunCopy
from penstock.runs.run_log import read_run
from penstock.runs.storage_check import check
from tests.log.conftest import add, ops
from tests.log.pooler import Pooler
from tests.support.commit_cutter import CommitCutter
from tests.support.groups import named_group
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process

SMALL: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 2, "untrained_groups": "accept"}


def name_of(path: Path) -> str:
    return f"run of {path.name}"


# ------------------------------------------------------------------ by the public API


def test_a_run_is_put_trained_and_gone_on_with(postgres: PostgresServer, tmp_path: Path) -> None:
    settings = {**SMALL, "log": postgres.url, "run": name_of(tmp_path)}
    with ps.open(tmp_path / "run", **settings) as plane:
        for name in "abc":
            plane.put(named_group(name))
        source = plane.source(rank=0)
        step = source.step()
        source.commit(step)
        source.flush()
        source.close()
        ledger = plane.ledger
        assert (ledger.committed, ledger.held) == (4, 2)
        assert plane.status()["log"] == f"{postgres.url}#run%20of%20{tmp_path.name}"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["log.url", "storage"]
    with ps.open(tmp_path / "run", **settings) as plane:
        assert plane.ledger == ledger
        assert not plane.put(named_group("a"))
        with pytest.raises(Conflict, match="this process has it open already"):
            ps.open(tmp_path / "run", **settings)


def test_a_planned_step_is_planned_again_for_another_number_of_ranks(postgres: PostgresServer, tmp_path: Path) -> None:
    settings = {**SMALL, "log": postgres.url, "run": name_of(tmp_path)}
    with ps.open(tmp_path / "run", **settings) as plane, plane.source(rank=0) as source:
        for name in "abcd":
            plane.put(named_group(name))
        before = source.step(timeout=60)
        groups = {name for batch in before for name in batch.segments.groups}
    with ps.open(tmp_path / "run", **{**settings, "ranks": 2}) as plane, ThreadPoolExecutor() as pool:

        def train(rank: int) -> ps.Step:
            with plane.source(rank) as source:
                step = source.step(timeout=60)
                source.commit(step)
                source.flush(60)
                return step

        steps = list(pool.map(train, range(2)))
        assert [step.number for step in steps] == [before.number] * 2
        assert {name for step in steps for batch in step for name in batch.segments.groups} == groups
        shown = read_run(tmp_path / "run")["steps"][0]
        assert shown["digests"] == [step.digest for step in steps]
        assert (plane.ledger.committed, plane.ledger.balanced) == (4, True)


def test_folders_that_name_a_database_are_read_by_every_command(postgres: PostgresServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ps.open(run, **SMALL, log=postgres.url, run=name_of(tmp_path), retain="all") as plane:
        for name in "abcd":
            plane.put(named_group(name))
        source = plane.source(rank=0)
        source.commit(source.step())
        source.flush()
        found = read_run(run)
        assert (found["num_groups"], found["next_step"], found["ledger"]["balanced"]) == (4, 2, True)
        assert len(RecordedRun.open(run).steps) == 1
        assert check(run).ok
        with RunCopy(run, tmp_path / "copy") as copying:
            assert copying.round().groups == 4
            plane.put(named_group("e"))
            assert copying.is_behind()
            assert copying.round().groups == 1
            assert not copying.is_behind()
        source.close()
    with ps.open(tmp_path / "copy", **SMALL, run=name_of(tmp_path)) as copied:  # an SQLite run of its own
        assert (copied.ledger.accepted, copied.ledger.committed) == (10, 4)


def test_a_folder_has_one_log(postgres: PostgresServer, tmp_path: Path) -> None:
    ps.open(tmp_path / "p", **SMALL, log=postgres.url, run=name_of(tmp_path)).close()
    ps.open(tmp_path / "s", **SMALL).close()
    with pytest.raises(ConfigError, match=r"its log is in postgresql://.*; give log="):
        ps.open(tmp_path / "p", **SMALL)
    with pytest.raises(Conflict, match=r"its log is log\.sqlite, not postgresql://"):
        ps.open(tmp_path / "s", **SMALL, log=postgres.url)
    with pytest.raises(ConfigError, match="memory:, which keeps nothing"):
        ps.open("memory:", **SMALL, log=postgres.url)


def test_another_run_of_the_same_name_is_not_taken_over(postgres: PostgresServer, tmp_path: Path) -> None:
    with ps.open(tmp_path / "a", **SMALL, log=postgres.url, run=name_of(tmp_path)) as plane:
        with pytest.raises(Conflict):
            ps.open(tmp_path / "b", **SMALL, log=postgres.url, run=name_of(tmp_path))
        plane.put(named_group("a"))
    with pytest.raises(Conflict, match="empty, and the log needs 1 frames there"):
        ps.open(tmp_path / "b", **SMALL, log=postgres.url, run=name_of(tmp_path))


def test_a_new_storage_for_a_run_that_began_elsewhere_is_refused(postgres: PostgresServer, tmp_path: Path) -> None:
    ps.open(tmp_path / "a", **SMALL, log=postgres.url, run=name_of(tmp_path)).close()
    with pytest.raises(Conflict, match=r"has its frames elsewhere; give this run another name \(`run`\)"):
        ps.open(tmp_path / "b", **SMALL, log=postgres.url, run=name_of(tmp_path))


def test_a_log_that_stepped_back_is_refused_by_the_marker(own_postgres: PostgresServer, tmp_path: Path) -> None:
    settings = {**SMALL, "log": own_postgres.url}
    with ps.open(tmp_path, **settings) as plane:
        plane.put(named_group("a"))
    own_postgres.execute(f"UPDATE {schema_of('run')}.run SET commits = 1, epoch = 0")
    with pytest.raises(Conflict, match="it was restored from a copy"):
        ps.open(tmp_path, **settings)


def test_a_log_that_lost_groups_is_recovered_in_its_database(own_postgres: PostgresServer, tmp_path: Path) -> None:
    """A failover lost the last transactions; storage has the frames, and its marker is ahead."""
    settings = {**SMALL, "log": own_postgres.url}
    with ps.open(tmp_path, **settings) as plane:
        for name in "abcd":
            plane.put(named_group(name))
    schema = schema_of("run")
    own_postgres.execute(f"DELETE FROM {schema}.groups WHERE op > 2; DELETE FROM {schema}.facts WHERE op > 2")
    own_postgres.execute(f"UPDATE {schema}.run SET commits = 1, epoch = 0")
    with pytest.raises(Conflict, match="it was restored from a copy"):
        ps.open(tmp_path, **settings)
    assert not check(tmp_path).ok
    assert main(["storage", "recover", str(tmp_path), "--yes"]) == 0
    assert check(tmp_path).ok
    with ps.open(tmp_path, **settings) as plane:
        assert plane.ledger.held == 8
        assert not plane.put(named_group("d"))


def test_quarantine_and_retention_are_decided_in_the_database(postgres: PostgresServer, tmp_path: Path) -> None:
    settings = {**SMALL, "log": postgres.url, "run": name_of(tmp_path)}
    with ps.open(tmp_path, **settings, retain="all") as plane:
        plane.put(named_group("a"))
    assert main(["storage", "forget", str(tmp_path), "--yes"]) == 0
    assert read_run(tmp_path)["retain"] == "steps"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("setting", ["synchronous_commit", "fsync"])
def test_servers_that_lose_what_they_acknowledged_are_refused(setting: str) -> None:
    with (
        PostgresServer(**{setting: "off"}) as server,
        pytest.raises(ConfigError, match=f"{setting} is off, so a crash of the server loses groups"),
    ):
        PostgresLog(server.url)


def test_a_transaction_pooler_is_refused(postgres: PostgresServer) -> None:
    pooler = Pooler(postgres.port)
    with pytest.raises(ConfigError, match="a pooler is in between, and fencing needs one session"):
        PostgresLog(postgres.url_at(pooler.port), run="pooled")
    pooler.close()


def test_a_database_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogAway, match=r"postgresql://nobody@127.0.0.1:1/x#run: .*refused"):
        ps.open(tmp_path, **SMALL, log="postgresql://nobody@127.0.0.1:1/x")
    assert not (tmp_path / "log.url").exists()


# ------------------------------------------------------------------ secrets

SECRET = "hunter2-geheim"


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://me:{SECRET}@host/db",
        f"postgresql://host/db?user=me&password={SECRET}",
        f"postgresql://host/db?sslpassword={SECRET}",
        f"postgres://me:{SECRET}@a:1,b:2/db?target_session_attrs=read-write",
    ],
)
def test_a_password_in_the_address_is_refused_and_never_shown(address: str, tmp_path: Path) -> None:
    assert SECRET not in redacted(address)
    with pytest.raises(ConfigError, match=r"contains a password.*PGPASSWORD.*PGPASSFILE.*service file") as caught:
        ps.open(tmp_path, **SMALL, log=address)
    assert SECRET not in f"{caught.value!r}"
    command = [sys.executable, "-m", "penstock", "serve", str(tmp_path), "--ranks", "1", "--seq-len", "64"]
    done = subprocess.run(
        [*command, "--groups-per-step", "1", "--log", address], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "PGPASSFILE" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    toml = {"folder": str(tmp_path), "log": address, "packing": {"ranks": 1, "seq_len": 64}, "target": {"groups": 1}}
    with pytest.raises(ConfigError) as caught:
        server_settings(toml)
    assert SECRET not in str(caught.value)


def test_a_password_of_the_environment_appears_nowhere(tmp_path: Path) -> None:
    """A server that asks for a password, and a plane process that finds it in PGPASSWORD."""
    with PostgresServer() as server:
        server.execute(f"CREATE ROLE worker LOGIN PASSWORD '{SECRET}'")
        server.execute("CREATE DATABASE runs OWNER worker")
        (server.data / "pg_hba.conf").write_text(
            "host all postgres 127.0.0.1/32 trust\nhost all all all scram-sha-256\n"
        )
        server.execute("SELECT pg_reload_conf()")
        address = f"postgresql://worker@127.0.0.1:{server.port}/runs"
        program = (
            "import json, sys, pathlib, penstock as ps\n"
            "from penstock.runs.run_log import read_run\n"
            "from tests.support.groups import named_group\n"
            "with ps.open(sys.argv[1], ranks=1, seq_len=64, groups_per_step=1, log=sys.argv[2],"
            " untrained_groups='accept') as plane:\n"
            "    plane.put(named_group('a'))\n"
            "    print(json.dumps(plane.status()), repr(plane), json.dumps(read_run(sys.argv[1])))\n"
            "    print(pathlib.Path('/proc/self/cmdline').read_bytes())\n"
            "print(sys.argv[1], [p.read_text() for p in pathlib.Path(sys.argv[1]).glob('*.url')])\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "run"), address]
        good = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PGPASSWORD": SECRET}
        )
        wrong = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PGPASSWORD": f"not {SECRET}"}
        )
        assert "LogAway" in wrong.stderr
        assert SECRET not in good.stdout + good.stderr + wrong.stdout + wrong.stderr


# ------------------------------------------------------------------ fencing and lost connections


def test_a_takeover_ends_a_session_that_hangs_inside_a_transaction(postgres: PostgresServer, tmp_path: Path) -> None:
    """The plane before is stopped inside a transaction, its row lock held: the next one does not wait for it."""
    program = (
        "import sys\nfrom penstock.log.postgres_log import PostgresLog\n"
        "log = PostgresLog(sys.argv[1], run=sys.argv[2])\n"
        "log._link.run(lambda c: (c.execute('BEGIN'), c.execute('SELECT begin_commit(1, 1)')))\n"
        "print('inside', flush=True)\nsys.stdin.read()\n"
        "try:\n    with log.transaction():\n        log.set_meta('late', 1)\n"
        "except Exception as error:\n    print(type(error).__name__, flush=True)\n"
    )
    command = [sys.executable, "-c", program, postgres.url, name_of(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as old:
        assert old.stdout is not None
        assert old.stdout.readline() == "inside\n"
        new = PostgresLog(postgres.url, run=name_of(tmp_path))
        add(new, 1)
        assert new.epoch == 2
        words, _ = old.communicate("")
    assert words == "Fenced\n"
    assert new.text("late") == ""
    new.close()


def test_a_decision_offline_is_refused_while_a_plane_is_at_work(postgres: PostgresServer, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom penstock.log.postgres_log import PostgresLog\n"
        "log = PostgresLog(sys.argv[1], run=sys.argv[2])\nprint('open', flush=True)\nsys.stdin.read()\nlog.close()\n"
    )
    command = [sys.executable, "-c", program, postgres.url, name_of(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as plane:
        assert plane.stdout is not None
        assert plane.stdout.readline() == "open\n"
        with pytest.raises(Conflict, match=f"the plane of process {plane.pid} of .* has it open; stop it first"):
            PostgresLog(postgres.url, run=name_of(tmp_path), take_over=False)
        plane.communicate("")
    log = PostgresLog(postgres.url, run=name_of(tmp_path), take_over=False)
    assert log.epoch == 2
    log.close()


@pytest.mark.parametrize("what", ["answer", "question"])
def test_a_connection_lost_inside_commit_is_found_out(postgres: PostgresServer, tmp_path: Path, what: str) -> None:
    with CommitCutter(postgres.port) as proxy:
        log = PostgresLog(postgres.url_at(proxy.port), run=name_of(tmp_path))
        add(log, 1)
        commits = log.commits
        for op in range(2, 6):
            proxy.cut = "answer" if what == "answer" else "question"
            add(log, op)
        assert (ops(log), log.commits, proxy.cuts) == ([1, 2, 3, 4, 5], commits + 4, 4)
        log.close()


def test_a_plane_taken_over_while_its_connection_is_lost_writes_nothing(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    with CommitCutter(postgres.port) as proxy:
        log = PostgresLog(postgres.url_at(proxy.port), run=name_of(tmp_path))
        add(log, 1)
        proxy.drop_all()
        new = PostgresLog(postgres.url, run=name_of(tmp_path))
        add(new, 2)
        with pytest.raises(Fenced, match="taken over by epoch 2"):
            add(log, 3)
        assert ops(new) == [1, 2]
        log.close()
        new.close()


def test_a_failover_that_lost_transactions_ends_the_plane(postgres: PostgresServer, tmp_path: Path) -> None:
    with CommitCutter(postgres.port) as proxy:
        log = PostgresLog(postgres.url_at(proxy.port), run=name_of(tmp_path))
        for op in (1, 2, 3):
            add(log, op)
        schema = schema_of(name_of(tmp_path))
        proxy.drop_all()
        postgres.execute(f"UPDATE {schema}.run SET commits = commits - 2; DELETE FROM {schema}.groups WHERE op > 1")
        with pytest.raises(CorruptFile, match="ends at transaction 2, and 4 were committed: a failover"):
            add(log, 4)
        with pytest.raises(CorruptFile):  # from now on it stays so
            log.check_epoch()
        log.close()


def test_a_database_that_stays_away_is_an_error_that_names_it(own_postgres: PostgresServer) -> None:
    log = PostgresLog(own_postgres.url, deadline_s=1.0)
    add(log, 1)
    waited: list[float] = []
    log.while_waiting = lambda: waited.append(1.0)
    own_postgres.pause()
    with pytest.raises(LogAway, match=r"postgresql://postgres@127.0.0.1:\d+/postgres#run: "):
        add(log, 2)
    with pytest.raises(LogAway):
        log.check_epoch()
    assert waited
    log.close()
    own_postgres.resume()
    again = PostgresLog(own_postgres.url)
    assert ops(again) in ([1], [1, 2])
    again.close()


def test_a_full_disk_of_the_database_is_a_full_disk(postgres: PostgresServer, tmp_path: Path) -> None:
    """The server's own error, provoked by a trigger: a volume of its own takes a minute to fill."""
    log = PostgresLog(postgres.url, run=name_of(tmp_path))
    schema = schema_of(name_of(tmp_path))
    postgres.execute(
        f"CREATE FUNCTION {schema}.full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'could not extend file' "
        f"USING ERRCODE = '53100'; END $$; CREATE TRIGGER full_ BEFORE INSERT ON {schema}.groups EXECUTE FUNCTION "
        f"{schema}.full()"
    )
    with pytest.raises(ps.PenstockError, match=r"could not extend file.*make room on the database's disk"):
        add(log, 1)
    postgres.execute(f"DROP TRIGGER full_ ON {schema}.groups")
    add(log, 1)
    assert ops(log) == [1]
    log.close()


def test_groups_that_are_only_asked_about_do_not_stay_in_memory(postgres: PostgresServer, tmp_path: Path) -> None:
    log = PostgresLog(postgres.url, run=name_of(tmp_path))
    add(log, 1)
    digest = log.digest_of("g1")
    names = [f"name {number}" for number in range(15_000)]
    for first in range(0, len(names), 1000):
        log.look_up(names[first : first + 1000], names[first : first + 1000])
    assert len(log._known) + len(log._discarded) <= 12_000
    assert log.digest_of("g1") == digest is not None
    assert log.digest_of("name 0") is None and not log.is_discarded("name 0")
    log.close()
