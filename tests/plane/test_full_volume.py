"""A volume that groups have filled: training goes on and makes room, and a full volume never prevents a start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

DRAIN = """
import os, sys
from pathlib import Path
import penstock as ps
from penstock.errors import DiskFull
from tests.support.groups import named_group

run = Path(sys.argv[1])
settings = dict(ranks=1, seq_len=64, groups_per_step=4, over_length="truncate", untrained_groups="accept")

def fill(plane, name):
    for i in range(2000):
        try:
            plane.put(named_group(f"{name}{i}", tokens=20_000))
        except DiskFull as error:
            print("refused:", str(error).split(";")[0].rpartition(": ")[2])
            return i
    raise AssertionError("never full")

plane = ps.open(run, **settings)
held = fill(plane, "a")
assert held > 40, held
plane.close()

(run.parent / "other").write_bytes(b"")  # somebody else takes whatever is left
with open(run.parent / "other", "wb", buffering=0) as other:
    try:
        while other.write(bytes(4096)):
            pass
    except OSError:
        pass
assert os.statvfs(run).f_bavail == 0

plane = ps.open(run, **settings)  # a full volume does not prevent a start
source = plane.source(0)
trained = 0
for step in source.steps(timeout=60):
    source.commit(step)
    trained += 1
    if plane.ledger.held < 8:
        break
source.flush(60)
assert trained >= held // 4 - 2, (trained, held)
accepted = 0
for i in range(12):  # it is writable again by itself
    plane.put(named_group(f"b{i}", tokens=20_000), timeout=60)
    accepted += 1
assert plane.ledger.balanced
source.close()
plane.close()
print("drained", trained >= held // 4 - 2, accepted)
"""


KEEP = """
import sys
import penstock as ps
from penstock.errors import DiskFull
from penstock.runs.run_log import kept_groups
from tests.support.groups import named_group

folder, direct = sys.argv[1:]
settings = dict(ranks=1, seq_len=64, groups_per_step=4, retain="all", retain_steps=0, direct=direct == "direct",
                over_length="truncate", untrained_groups="accept")
plane = ps.open(folder, **settings)
source, put, words = plane.source(0), 0, []
while len(words) < 3:
    try:
        plane.put(named_group(f"g{put}", tokens=20_000), timeout=60)
        put += 1
    except DiskFull as error:
        words.append(str(error))
        continue
    if put % 4 == 0:
        source.commit(source.step(timeout=60))
source.flush(60)
assert put > 40 and plane.ledger.balanced, put
assert all('retain="all"' in text for text in words), words
source.close()
plane.close()
assert len(kept_groups(folder)) == put
print("kept")
"""


GO_ON = """
import sys, time
import penstock as ps
from penstock.errors import DiskFull
from tests.support.groups import named_group

folder, storage = sys.argv[1:]
settings = dict(ranks=1, seq_len=64, groups_per_step=2, over_length="truncate", untrained_groups="accept")
plane = ps.open(folder, storage=storage, **settings)
source, put, refused, deadline = plane.source(0), 0, 0, time.monotonic() + 120
while put < 200:
    assert time.monotonic() < deadline, (put, refused)
    try:
        plane.put(named_group(f"g{put}", tokens=20_000), timeout=60)
    except DiskFull:
        refused += 1
        continue
    put += 1
    if put % 2 == 0:
        source.commit(source.step(timeout=60))
source.flush(60)
counts = plane.status()["counts"]
assert refused and counts["puts_failed"] == refused, (refused, counts)
assert plane._direct.writer() is not None and 40 < counts["groups_direct"] < 200, counts
assert plane.ledger.balanced and plane.ledger.committed == 400
source.close()
plane.close()
print("went on")
"""


def _can_mount() -> bool:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def test_a_volume_that_puts_have_filled_is_drained_by_training_and_writable_again(tmp_path: Path) -> None:
    if not _can_mount():
        pytest.skip("needs a mount namespace: run as root, or allow user namespaces")
    mount = f'mount -t tmpfs -o size=24m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}/run'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, DRAIN], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "drained True 12"


@pytest.mark.parametrize("way", ["direct", "passing"])
def test_a_full_volume_frees_nothing_of_a_run_that_keeps_everything(tmp_path: Path, way: str) -> None:
    if not _can_mount():
        pytest.skip("needs a mount namespace: run as root, or allow user namespaces")
    mount = f'mount -t tmpfs -o size=24m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}/run {way}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, KEEP], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "kept"


def test_a_full_storage_volume_of_its_own_is_freed_by_the_plane_and_direct_puts_go_on(tmp_path: Path) -> None:
    """The log has room: only a write to storage fails. The group then passes the plane, whose answer counts."""
    if not _can_mount():
        pytest.skip("needs a mount namespace: run as root, or allow user namespaces")
    storage = tmp_path / "storage"
    storage.mkdir()
    mount = f'mount -t tmpfs -o size=8m none {storage} && exec {sys.executable} -c "$0" {tmp_path}/run {storage}/s'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, GO_ON], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.splitlines()[-1] == "went on"
