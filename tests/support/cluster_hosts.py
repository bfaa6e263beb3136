"""Two hosts that share no filesystem, and a network with a database and an object store, on one machine.

    host0       10.213.0.1    its own folder, /dev/shm, hostname and boot id; everything else is read-only
    host1       10.213.0.2    the same
    services    10.213.0.3    PostgreSQL and the ports of S3 proxies; the switch that both cables are plugged into

`cut(0)` takes the cable of host0 out of the switch: nothing passes, and both ends keep their connections. Everything is
in namespaces of its own, so nothing is left when this process ends. No packet leaves the three. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from pathlib import Path

from tests.support.hosts import Hosts, NoNamespaces

ADDRESSES = ("10.213.0.1", "10.213.0.2")
SERVICES = "10.213.0.3"
NAMES = ("host0", "host1")
_CLONE_NEWNET = 0x40000000
_HOLD_HOST = """
set -e
top=$1 name=$2
mount -n -t tmpfs none /mnt
mkdir /mnt/own
mount -n --bind "$top/$name" /mnt/own
while read -r _ at kind _; do
  case $kind:$at in
    proc:*|sysfs:*|devtmpfs:*|devpts:*|cgroup*:*|*:/mnt|*:/mnt/own) ;;
    *) mount -n -o remount,bind,ro "$at" 2>/dev/null || true ;;
  esac
done < /proc/mounts
mount -n -t tmpfs none "$top"
mkdir "$top/$name"
mount -n --move /mnt/own "$top/$name"
umount -n /mnt
mount -n -t tmpfs none /dev/shm
mount -n --bind "$top/$name/boot_id" /proc/sys/kernel/random/boot_id
echo "$name" > /proc/sys/kernel/hostname
ip link set lo up
echo ready
exec cat
"""
"""Makes the view of one host and holds it. The boot id tells processes of two hosts apart, whose pids are of one
machine here."""
_HOLD_SERVICES = "ip link set lo up; ip link add switch type bridge; ip link set switch up; echo ready; exec cat"


class ClusterHosts(Hosts):
    """The namespaces of the hosts and of the services."""

    def _make(self, top: Path) -> None:
        if self._user:
            raise NoNamespaces("hosts without a shared filesystem need root: they mount everything else read-only")
        for name in NAMES:
            (top / name).mkdir(parents=True, mode=0o700)
            (top / name / "boot_id").write_text(f"{name}\n")
            self._hold(_HOLD_HOST, top, [name], ("--mount", "--uts", "--propagation=private"))
        self._hold(_HOLD_SERVICES, top, [], ())
        self._plug_in()
        self._check_apart(top)

    def _plug_in(self) -> None:
        for host, address in enumerate(ADDRESSES):
            self._run(2, f"ip link add port{host} type veth peer name cable netns {self._holders[host].pid}")
            self._run(2, f"ip link set port{host} master switch up")
            self._run(host, f"ip addr add {address}/24 dev cable")
            self._run(host, "ip link set cable up")
        self._run(2, f"ip addr add {SERVICES}/24 dev switch")

    def _check_apart(self, top: Path) -> None:
        """Each host sees and writes its own folder and nothing that the other one sees."""
        for host, name in enumerate(NAMES):
            assert self.sees(host, top / name) and not self.sees(host, top / NAMES[1 - host])
            probe = [*self.prefix(host), "sh", "-c", f"touch {top}/{name}/probe; touch {top.parent}/probe"]
            subprocess.run(probe, check=False, capture_output=True)
            assert (top / name / "probe").exists(), f"{name} cannot write to its folder {top / name}"
            assert not (top.parent / "probe").exists(), f"{name} writes to {top.parent}, which the other host sees"

    def prefix(self, host: int) -> list[str]:
        kinds = ["--net"] if host == 2 else ["--net", "--mount", "--uts"]
        return ["nsenter", f"--target={self._holders[host].pid}", *kinds]

    def cut(self, host: int) -> None:
        """Nothing passes between a host and all others."""
        self._run(2, f"ip link set port{host} down")

    def mend(self, host: int) -> None:
        self._run(2, f"ip link set port{host} up")

    def listener(self) -> socket.socket:
        """A socket of this process that is bound to a free port of the services' address."""
        made: list[socket.socket] = []

        def bind() -> None:
            # A namespace is that of a thread; the socket stays in it when the thread has ended.
            with open(f"/proc/{self._holders[2].pid}/ns/net", "rb") as space:  # noqa: PTH123 - no file of ours
                if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            made.append(socket.create_server((SERVICES, 0)))

        thread = threading.Thread(target=bind)
        thread.start()
        thread.join()
        if not made:
            raise NoNamespaces("no socket could be made in the network namespace of the services")
        return made[0]
