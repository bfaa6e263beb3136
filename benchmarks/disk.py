"""Where benchmarks of durable things keep their files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def disk_folder() -> Iterator[Path]:
    """A folder on a real disk: where temporary files live in memory, syncing them would measure nothing."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    in_memory = {Path(fields[1]) for fields in mounts if fields[2] in ("tmpfs", "ramfs")}
    home = Path(tempfile.gettempdir()).resolve()
    if in_memory & {home, *home.parents}:
        home = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=home) as folder:
        yield Path(folder)
