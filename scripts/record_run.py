"""Shrink a run to what the site shows of it, in one small file: docs/site/demo-run.tar.xz.

.venv/bin/penstock demo --chaos --folder runs/demo
.venv/bin/python -m scripts.record_run runs/demo docs/site/demo-run.tar.xz

`make docs` makes the page of the site from it, with the viewer as it is then. Kept are metrics, events, the tokenizer,
some groups of the last exported step, and the plane's log without metadata and plans.
"""

from __future__ import annotations

import argparse
import sqlite3
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import xxhash

from penstock.log import EVENTS, LOG, copy_log, plane_of, reading, run_events_of
from penstock.plane import read_manifest
from penstock.view.folders import promote, read_done, step_folder, write_done
from penstock.view.reader import Export

FILES = ("metrics.jsonl", "plane.jsonl", "events.jsonl", "state.json", "tokenizer.json")
META = ("format", "run_id", "epoch", "session", "next_step", "oldest_step", "commits")
"""Kept of the log's values. Others name paths, hosts and addresses."""
GROUPS = 12
"""Groups kept of the step, with all their samples."""


def record(run: Path, target: Path) -> None:
    """Write what is kept of a run into one file."""
    with tempfile.TemporaryDirectory() as temporary:
        small = Path(temporary) / "demo"
        (small / "plane").mkdir(parents=True)
        for name in FILES:
            if (run / name).is_file():
                (small / name).write_bytes((run / name).read_bytes())
        state = msgspec.json.decode((run / "state.json").read_bytes())
        (small / "state.json").write_bytes(msgspec.json.encode({**state, "host": "", "pid": 0}))
        shrink_step(run, small)
        shrink_log(run, small / "plane" / LOG)
        with tarfile.open(target, "w:xz", preset=9) as tar:
            tar.add(small, "demo", filter=anonymous)


def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who packed a file, and when."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def shrink_step(run: Path, small: Path) -> None:
    """Copy the last exported step with the records of a few groups."""
    step = Export(run).steps("")[-1]
    made = step_folder(small, "", step.number)
    made.mkdir(parents=True)
    kept = list(dict.fromkeys(one.fields["group_id"] for one in step.records()))[:GROUPS]
    for rank, path in step.files().items():
        lines = path.read_bytes().splitlines(keepends=True)
        data = b"".join(line for line in lines if msgspec.json.decode(line)["group_id"] in kept)
        (made / path.name).write_bytes(data)
        done = read_done(step.path, rank)
        assert done is not None
        records = data.count(b"\n")
        left_out = done.skipped + done.records - records
        digest = xxhash.xxh3_128(data).hexdigest()
        write_done(
            made,
            msgspec.structs.replace(done, num_bytes=len(data), digest=digest, records=records, skipped=left_out),
        )
    promote(made)


def shrink_log(run: Path, target: Path) -> None:
    """Copy the plane's log without what only a plane needs."""
    plane = plane_of(run)
    assert plane is not None, f"{run}: no plane"
    copy_log(plane, target)
    with reading(plane) as found:
        nowhere = [msgspec.structs.replace(one, pid=0, host="", space="") for one in run_events_of(found)]
    with closing(sqlite3.connect(target, isolation_level=None)) as log:
        for table in ("facts", "snapshots", "frees", "segments", "discards"):
            log.execute(f"DELETE FROM {table}")
        marks = ", ".join("?" * len(META))
        log.execute(f"DELETE FROM meta WHERE name NOT IN ({marks})", META)
        log.execute("INSERT INTO meta VALUES (?, ?)", (EVENTS, msgspec.json.encode(nowhere).decode()))
        log.execute("UPDATE groups SET digest = x'', location = '', kinds = x'90'")
        for step, data in log.execute("SELECT step, manifest FROM steps").fetchall():
            manifest = msgspec.structs.replace(read_manifest(data), rank_plans=(), needs=(), digests=(), packing="")
            log.execute("UPDATE steps SET manifest = ? WHERE step = ?", (msgspec.msgpack.encode(manifest), step))
        log.execute("PRAGMA page_size=4096")
        log.execute("VACUUM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    record(args.run, args.target)
    print(f"{args.target}: {args.target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
