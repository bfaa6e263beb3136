"""List, verify and clean up the images of a run.

penstock assets list runs/demo          the run's folder, or its asset store
penstock assets verify runs/demo        read and hash every image; exit 1 if one is damaged or missing
penstock assets sweep runs/demo         delete processed features that are not used; images are never deleted
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from penstock.assets import TTL_S, AssetStore, list_assets, sweep, verify_assets
from penstock.commands.terminal import Progress
from penstock.errors import InvalidInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "verify", "sweep"])
    parser.add_argument("folder", type=Path, help="the run's folder, or that of its asset store")
    parser.add_argument(
        "--ttl", type=float, default=TTL_S, help="sweep: seconds since the last use (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        raise InvalidInput(f"{args.folder}: not a folder; give the folder of an asset store")
    folder = store_folder(args.folder)
    if folder == args.folder and not _is_store(folder) and not _is_run(folder):
        raise InvalidInput(f"{folder}: no asset store and no run in it; give the folder of one of them")
    store = AssetStore(folder)
    if args.action == "list":
        return _list(store, as_json=args.json)
    if args.action == "verify":
        return _verify(store, as_json=args.json)
    removed, kept = sweep(store, ttl_s=args.ttl), sum(1 for _ in store.list())
    report = {"features_removed": removed, "ttl_s": args.ttl, "images_kept": kept}
    print(json.dumps(report) if args.json else f"{removed} features removed, {kept} images kept")
    return 0


def store_folder(folder: Path) -> Path:
    """Return the folder of an asset store, given its own or that of its run."""
    return folder if _is_store(folder) or not (folder / "assets").is_dir() else folder / "assets"


def _is_store(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in ("images", "claims", "pending"))


def _is_run(folder: Path) -> bool:
    """Return whether a run is in a folder, which may have no images."""
    from penstock.log import plane_of

    return plane_of(folder) is not None


def _list(store: AssetStore, *, as_json: bool) -> int:
    rows = list_assets(store)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.modified))
        print(f"{row.hash}  {row.num_bytes:>10,} B  used {used}  {', '.join(row.runs)}")
    print(f"{len(rows)} images, {sum(row.num_bytes for row in rows):,} bytes")
    return 0


def _verify(store: AssetStore, *, as_json: bool) -> int:
    progress = Progress()
    report = verify_assets(store, progress=lambda num_bytes: progress(f"{num_bytes:,} bytes read"))
    progress.end()
    if as_json:
        print(json.dumps({**asdict(report), "ok": report.ok}))
    else:
        for line in (*report.corrupt, *(f"{image}: was stored, and is missing" for image in report.missing)):
            print(line)
        notes = f", {report.quarantined} quarantined earlier" if report.quarantined else ""
        notes += f", {report.unfinished} left unfinished by a writer that was killed" if report.unfinished else ""
        print(f"{report.checked} images, {report.num_bytes:,} bytes: {'healthy' if report.ok else 'DAMAGED'}{notes}")
    return 0 if report.ok else 1
