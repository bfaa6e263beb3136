"""The run that is killed again and again, on two hosts that share no filesystem: log in PostgreSQL, frames in S3.

    host0       a producer, ranks 0 and 1
    host1       a producer, ranks 2 and 3
    either      the plane (`penstock serve` without a folder): it is started on the other host each time
    services    PostgreSQL, and an S3 server (moto) behind a proxy for each plane and one for all clients

Clients are told the log's address and find the plane by it. `FAULTS` has what happens to them: kills, pauses, cables
that are cut. Afterwards every acknowledged group is there and trained once, all steps are those of an undisturbed run,
and a plane that was taken for dead has written no row and changed no object since. It is run by
`scripts/torture --transports cluster`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from penstock.log import Log
from penstock.log.postgres_address import schema_of
from penstock.log.postgres_log import PostgresLog
from penstock.plane.settings import PlaneSettings
from penstock.server.daemon import Exit
from penstock.transport.keys import make_keys
from tests.support.cluster_audit import Audit, PlaneStart, Span, late_changes, outage
from tests.support.cluster_hosts import ADDRESSES, NAMES, SERVICES, ClusterHosts
from tests.support.object_proxy import ObjectProxy
from tests.support.postgres_server import PostgresServer
from tests.support.processes import TIMEOUTS, settings
from tests.support.s3_server import make_bucket, s3_environment, s3_server
from tests.support.torture import Result, Run, Started

RUN = "torture"
_NAMES = ("heartbeat_s", "peer_s", "delivery_s", "plane_s", "resend_s")


class Cluster:
    """Hosts, database and object store; and the ways to the store."""

    def __init__(self, top: Path, hosts: ClusterHosts, server: PostgresServer, endpoint: str) -> None:
        self.top, self.hosts, self.server = top, hosts, server
        self._endpoint, self._proxies = endpoint, list[ObjectProxy]()
        self.storage = f"s3://{make_bucket(endpoint)}/runs/{RUN}"
        self.log = server.net_url
        """As the hosts reach it."""
        self.clients = self.proxy()
        """The way of producers and ranks to the store."""
        self.starts: list[PlaneStart] = []

    def proxy(self) -> ObjectProxy:
        """One more way to the object store."""
        self._proxies.append(ObjectProxy(self._endpoint, listener=self.hosts.listener()))
        return self._proxies[-1]

    def environment(self, proxy: ObjectProxy, host: int, who: str) -> dict[str, str]:
        mine = {"TMPDIR": str(self.top / NAMES[host]), "PGOPTIONS": f"-c penstock.who={who}"}
        return {**os.environ, **s3_environment(proxy.url), **mine}

    def start_plane(self, host: int, errors: BinaryIO, *, ranks: int, moves: bool = True) -> subprocess.Popen[bytes]:
        """`penstock serve` on a host."""
        like, who, proxy = settings(ranks), f"plane-{len(self.starts)}", self.proxy()
        words = [
            f"--run={RUN}",
            f"--log={self.log}",
            f"--storage={self.storage}",
            f"--listen=tcp://{ADDRESSES[host]}:*",
        ]
        words += [f"--ranks={ranks}", f"--seq-len={like.packing.seq_len}", f"--groups-per-step={like.target.groups}"]
        words += [f"--over-length={like.over_length}", f"--untrained-groups={like.untrained_groups}"]
        words += [f"--max-held-bytes={like.max_held_bytes}", f"--retain-steps={like.retain_steps}"]
        words += [f"--set=timeouts.{name}={getattr(TIMEOUTS, name)}" for name in _NAMES]
        words += [f"--keys={self.top / NAMES[host] / 'plane-keys'}", f"--parent={os.getpid()}"]
        command = [*self.hosts.prefix(host), sys.executable, "-m", "penstock.cli", "serve", *words]
        env = self.environment(proxy, host, who)
        self.starts.append(PlaneStart(who=who, proxy=proxy, at=time.time(), moves=moves))
        return subprocess.Popen(command, stderr=errors, stdout=errors, env=env)

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.__exit__()


class ClusterRun(Run):
    """A run whose plane moves between two hosts."""

    patience_s = 240.0

    def __init__(self, cluster: Cluster, seed: int, faults: Sequence[str]) -> None:
        super().__init__(cluster.top, "cluster", seed)
        self._kinds = sorted(faults)
        self._cluster, self._url = cluster, f"{cluster.log}#{RUN}"
        self._host = 0
        """Of the plane."""
        self._moves = False
        self._audit: Audit | None = None
        self._spans: list[Span] = []
        self._replaced: list[PlaneStart] = []
        """Planes that were replaced while they lived, and came back."""
        self._resumed: dict[str, float] = {}
        """When those that were paused went on."""
        self._next: list[str] = []
        """Kinds of faults that are still to come in this round."""

    # -------------------------------------------------------------- processes

    def place(self, name: str) -> Path:
        return self.folder / NAMES[_host_of(name)]

    def start(self, name: str) -> None:
        if not name.startswith("plane"):
            super().start(name)
            return
        with (self.folder / f"{name}.err").open("ab") as errors:
            found = self._cluster.start_plane(self._host, errors, ranks=self.ranks, moves=self._moves)
            self._processes[name] = found

    def launch(self, name: str, words: list[str], errors: BinaryIO) -> Started:
        host = _host_of(name)
        command = [*self._cluster.hosts.prefix(host), sys.executable, "-m", "tests.support.processes", *words]
        env = self._cluster.environment(self._cluster.clients, host, name)
        return subprocess.Popen(command, stderr=errors, stdout=errors, env=env)

    def options(self, name: str) -> list[str]:
        keys = self.place(name) / ("writer-keys" if name.startswith("producer") else "client-keys")
        return [f"--keys={keys}", "--alone"]

    def settings(self) -> PlaneSettings:
        return settings(self.ranks, storage=self._cluster.storage)

    def open_log(self) -> Log:
        return PostgresLog(self._cluster.server.url, run=RUN, take_over=False)

    # -------------------------------------------------------------- faults

    def _kill_one(self, pause_s: float) -> None:
        self._await_step(self._step() + 1)
        if self._audit is None:
            self._audit, self._moves = Audit(self._cluster.server, schema_of(RUN)), True
        time.sleep(self._rng.random() * pause_s)
        if not self._next:
            self._next = self._rng.sample(self._kinds, len(self._kinds))
        kind, began = self._next.pop(), time.time()
        ended = FAULTS[kind](self)
        self.result.kills[kind] += 1
        self._spans.append(Span(kind=kind, began=began, ended=ended))

    def _a(self, kind: str) -> str:
        """The name of a process of a kind."""
        return self._rng.choice([name for name in self._names if name.startswith(kind)])

    def _wait(self, least_s: float, most_s: float) -> float:
        """Let a fault last for a while. Returns the time of day when it is to end."""
        time.sleep(self._rng.uniform(least_s, most_s))
        return time.time()

    def plane_killed(self) -> float:
        self.kill("plane-0")
        return self._move_plane()

    def plane_killed_for_long(self) -> float:
        """The next one is started when everybody has looked for it for a while, in vain."""
        self.kill("plane-0")
        self._wait(4.0, 8.0)
        return self._move_plane()

    def plane_paused(self) -> float:
        """Paused and taken for dead. It goes on when the next one is at work."""
        self._processes["plane-0"].send_signal(signal.SIGSTOP)
        return self._replace_paused()

    def plane_paused_deleting(self) -> float:
        """The same, right after it has moved the marker of the storage to delete frames, and before it does."""
        old, stopped = self._processes["plane-0"], threading.Event()

        def stop(method: str, path: str) -> None:
            if method == "PUT" and path.endswith("/marker") and not stopped.is_set():
                old.send_signal(signal.SIGSTOP)
                stopped.set()

        self._cluster.starts[-1].proxy.on_change = stop
        assert stopped.wait(self.patience_s), f"the plane deleted nothing for {self.patience_s} s: {self.folder}"
        return self._replace_paused()

    def _replace_paused(self) -> float:
        """Start the next plane, let it work, and resume the one before, which must end by itself."""
        old = self._processes["plane-0"]
        self._replaced.append(self._cluster.starts[-1])
        try:
            ended = self._move_plane()
            self._await_step(self._step() + 2)
            self._resumed[self._replaced[-1].who] = time.time()
            old.send_signal(signal.SIGCONT)
            self._await_fenced(old)
        finally:
            old.kill()
        return ended

    def plane_cut_off(self) -> float:
        """The cable of its host is cut and the plane taken for dead. Ranks and a producer are cut off with it."""
        old, host = self._processes["plane-0"], self._host
        self._replaced.append(self._cluster.starts[-1])
        self._cluster.hosts.cut(host)
        try:
            self._moves = False
            self._move_plane()
            self._moves = True
            ended = self._wait(1.0, 4.0)
            self._cluster.hosts.mend(host)
            self._await_fenced(old)
        finally:
            old.kill()
        return ended

    def plane_doubled(self) -> float:
        """Another one is started while it works, as by mistake."""
        old = self._processes["plane-0"]
        self._replaced.append(self._cluster.starts[-1])
        try:
            self._move_plane()
            self._await_fenced(old)
        finally:
            old.kill()
        return time.time()

    def postgres_killed(self) -> float:
        self._cluster.server.kill()
        self._wait(0.0, 2.0)
        self._cluster.server.start()
        return time.time()

    def postgres_paused(self) -> float:
        self._cluster.server.pause()
        ended = self._wait(1.0, 5.0)
        self._cluster.server.resume()
        return ended

    def link_cut(self) -> float:
        """The cable of either host, that of the plane as often as the other."""
        host = self._rng.choice([0, 1])
        self._cluster.hosts.cut(host)
        ended = self._wait(1.0, 5.0)
        self._cluster.hosts.mend(host)
        return ended

    def producer_killed(self) -> float:
        name = self._a("producer")
        self.kill(name)
        self.start(name)
        return time.time()

    def producer_paused(self) -> float:
        return self._pause(self._a("producer"))

    def rank_killed(self) -> float:
        name = self._a("rank")
        raised = [len(self._raises(rank)) for rank in range(self.ranks)]
        self._await_raises(int(name.split("-")[1]), raised, self.kill(name))
        self.start(name)
        return time.time()

    def rank_paused(self) -> float:
        return self._pause(self._a("rank"))

    def _pause(self, name: str) -> float:
        process = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        ended = self._wait(1.0, 5.0)
        process.send_signal(signal.SIGCONT)
        return ended

    def _move_plane(self) -> float:
        """Start the plane on the other host."""
        self._host = 1 - self._host
        self.start("plane-0")
        return time.time()

    def _await_fenced(self, old: Started) -> None:
        """Wait until a plane that was taken over has ended by itself."""
        deadline = time.monotonic() + self.patience_s
        while old.poll() is None:
            assert time.monotonic() < deadline, f"the old plane did not end in {self.patience_s} s: {self.folder}"
            time.sleep(0.02)
        assert old.poll() == Exit.FENCED, f"the old plane ended with {old.poll()}: {self.folder / 'plane-0.err'}"
        self.result.fenced += 1

    # -------------------------------------------------------------- what came out

    def end(self) -> None:
        assert self._audit is not None
        commits, result, starts = self._audit.commits(), self.result, self._cluster.starts
        for span in self._spans:
            result.outages.setdefault(span.kind, []).append(outage(span, commits))
            result.lasted.setdefault(span.kind, []).append(span.ended - span.began)
        result.first_steps = self._audit.first_steps(starts)
        for one in self._replaced:
            self._audit.check_seen(one)
        result.late_rows = self._audit.late_rows(starts)
        late = late_changes(starts, self._resumed)
        result.late_changes = len(late)
        (self.folder / "late").write_text("\n".join(map(str, late)))


def _host_of(name: str) -> int:
    kind, number = name.split("-")
    return int(number) // (2 if kind == "rank" else 1)


FAULTS: dict[str, Callable[[ClusterRun], float]] = {
    "plane killed": ClusterRun.plane_killed,
    "plane killed for long": ClusterRun.plane_killed_for_long,
    "plane paused": ClusterRun.plane_paused,
    "plane paused while it deletes": ClusterRun.plane_paused_deleting,
    "plane doubled": ClusterRun.plane_doubled,
    "plane cut off": ClusterRun.plane_cut_off,
    "PostgreSQL killed": ClusterRun.postgres_killed,
    "PostgreSQL paused": ClusterRun.postgres_paused,
    "link cut": ClusterRun.link_cut,
    "producer killed": ClusterRun.producer_killed,
    "producer paused": ClusterRun.producer_paused,
    "rank killed": ClusterRun.rank_killed,
    "rank paused": ClusterRun.rank_paused,
}
"""What happens to a run, by name. Each is done and mended, and returns when it was mended."""


def give_keys(top: Path) -> None:
    """Copies of the keys for each host: a host has no folder of another one."""
    make_keys(top / "keys", writers=("worker",))
    for name in NAMES:
        shutil.copytree(top / "keys", top / name / "plane-keys")
        for folder, pair in (("client-keys", "client"), ("writer-keys", "worker")):
            (top / name / folder).mkdir(mode=0o700)
            shutil.copy2(top / "keys" / "plane.key", top / name / folder / "plane.key")
            for end in ("key", "secret"):
                shutil.copy2(top / "keys" / f"{pair}.{end}", top / name / folder / f"client.{end}")


def torture_cluster(
    top: Path,
    *,
    kills: int,
    seed: int = 0,
    faults: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """So many faults, each kind as often as the others; `faults` names them, by default all.

    The folder is kept if anything was wrong. Raises NoNamespaces."""
    with ClusterHosts(top) as hosts:
        give_keys(top)
        with PostgresServer(address=SERVICES, prefix=hosts.prefix(2)) as server, s3_server() as endpoint:
            cluster, before = Cluster(top, hosts, server, endpoint), dict(os.environ)
            os.environ.update(s3_environment(endpoint))  # for the judge, which is on no host
            try:
                result = ClusterRun(cluster, seed, faults or tuple(FAULTS)).go(kills, progress)
            finally:
                cluster.close()
                os.environ.clear()
                os.environ.update(before)
    result.check_ways()
    if result.good:
        shutil.rmtree(top)
    return result
