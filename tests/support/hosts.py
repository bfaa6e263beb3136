"""Two hosts on one machine: mount and network namespaces of their own, one link between them, some folders shared.

    host 0    10.213.0.1    plane, its log and keys; a producer, two ranks
    host 1    10.213.0.2    a producer, two ranks; neither log nor plane keys can be seen here
    both                    the storage, notes and checkpoints; the keys of clients and writers

Nothing is made in the machine's own namespaces, so nothing is left there when this process ends, however it does. No
packet leaves the two hosts. `scripts/torture --transports hosts` kills a run that is spread over them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.plane.settings import PlaneSettings
from penstock.transport.keys import make_keys
from tests.support.processes import settings
from tests.support.torture import Result, Run

ADDRESSES = ("10.213.0.1", "10.213.0.2")
SHARED = ("storage", "notes", "client-keys", "writer-keys")
PRIVATE = (("plane",), ())
"""Folders that only one host sees."""
_HOLD = """
set -e
top=$1; shift
mount -t tmpfs none /mnt
for name; do mkdir "/mnt/$name"; mount --bind "$top/$name" "/mnt/$name"; done
mount -t tmpfs none "$top"
for name; do mkdir "$top/$name"; mount --bind "/mnt/$name" "$top/$name"; umount "/mnt/$name"; done
umount /mnt
mount -t tmpfs none /dev/shm
ip link set lo up
echo ready
exec cat
"""
"""Makes the view of one host, and holds its namespaces until the pipe to it is closed."""


class NoNamespaces(Exception):
    """This machine lets this user make no network and mount namespaces."""


class Hosts:
    """Their namespaces, held open by one process each."""

    def __init__(self, top: Path) -> None:
        """Raises NoNamespaces with the reason."""
        self._holders: list[subprocess.Popen[str]] = []
        self._user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        try:
            self._make(top)
        except (OSError, NoNamespaces) as error:
            self.close()
            raise NoNamespaces(str(error)) from None

    def _make(self, top: Path) -> None:
        for private in PRIVATE:
            self._hold(_HOLD, top, [*SHARED, *private])
        self._link()

    def _hold(
        self, script: str, top: Path, names: Sequence[str], kinds: Sequence[str] = ("--mount", "--propagation=private")
    ) -> None:
        spaces = ["unshare", "--net", *kinds]
        if self._user and not self._holders:
            spaces.append("--map-root-user")
        elif self._user:
            spaces = ["nsenter", f"--target={self._holders[0].pid}", *self._user, *spaces]
        words = [*spaces, "sh", "-c", script, "sh", str(top), *names]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise NoNamespaces(f"{' '.join(spaces)}: {holder.stderr.read().strip()}")

    def _link(self) -> None:
        """A cable between the two, and an address at each end."""
        self._run(0, f"ip link add cable type veth peer name cable netns {self._holders[1].pid}")
        for host, address in enumerate(ADDRESSES):
            self._run(host, f"ip addr add {address}/30 dev cable")
            self._run(host, "ip link set cable up")

    def _run(self, host: int, words: str) -> None:
        done = subprocess.run([*self.prefix(host), *words.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoNamespaces(f"{words}: {done.stderr.strip()}")

    def prefix(self, host: int) -> list[str]:
        """Arguments that run a command on a host, before the command's own. The process becomes the command."""
        return ["nsenter", f"--target={self._holders[host].pid}", *self._user, "--net", "--mount"]

    def sees(self, host: int, path: Path) -> bool:
        return subprocess.run([*self.prefix(host), "test", "-e", str(path)], check=False).returncode == 0

    def close(self) -> None:
        for holder in self._holders:
            for pipe in (holder.stdin, holder.stdout, holder.stderr):
                assert pipe is not None
                pipe.close()
            holder.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HostsRun(Run):
    """A run whose processes are spread over two hosts; the plane has keys, and producers a writer's."""

    def __init__(self, top: Path, hosts: Hosts, seed: int) -> None:
        super().__init__(top / "notes", "hosts", seed)
        self._top, self._hosts, self._url = top, hosts, f"tcp://{ADDRESSES[0]}:7440"
        assert hosts.sees(0, top / "plane") and not hosts.sees(1, top / "plane")
        assert hosts.sees(1, top / "storage") and not hosts.sees(0, top / "elsewhere")

    def prefix(self, name: str) -> list[str]:
        kind, number = name.split("-")
        return self._hosts.prefix({"plane": 0, "producer": int(number), "rank": int(number) // 2}[kind])

    def options(self, name: str) -> list[str]:
        if name.startswith("plane"):
            return [f"--run={self.log_folder}", f"--storage={self._top / 'storage'}", f"--keys={self._top}/plane/keys"]
        return [f"--keys={self._top / ('writer-keys' if name.startswith('producer') else 'client-keys')}"]

    def settings(self) -> PlaneSettings:
        return settings(self.ranks, storage=str(self._top / "storage"))

    @property
    def log_folder(self) -> Path:
        return self._top / "plane" / "run"


def torture_hosts(top: Path, *, kills: int, seed: int = 0, progress: Callable[[str], None] = lambda _: None) -> Result:
    """Kill processes of two hosts `kills` times. Keeps the folder if anything was wrong. Raises NoNamespaces."""
    for name in (*SHARED, *PRIVATE[0], "elsewhere"):
        (top / name).mkdir(parents=True, mode=0o700)
    keys = top / "plane" / "keys"
    make_keys(keys, writers=("worker",))
    for folder, pair in (("client-keys", "client"), ("writer-keys", "worker")):
        shutil.copy2(keys / "plane.key", top / folder / "plane.key")
        for end in ("key", "secret"):
            shutil.copy2(keys / f"{pair}.{end}", top / folder / f"client.{end}")
    with Hosts(top) as hosts:
        result = HostsRun(top, hosts, seed).go(kills, progress)
    result.check_ways()
    if result.good:
        shutil.rmtree(top)
    return result
