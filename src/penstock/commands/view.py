"""Look at every token of a run: a local page with samples, tokens, packed grids and curves.

  penstock view runs/demo                                     a run: its curves, steps, groups, samples
  penstock view runs                                          a folder of runs: a table of them
  penstock view runs/demo --tokenizer models/tiny             show text instead of token ids
  penstock view runs/demo --step 12 --html step12.html        one file to share; --sample for one sample of it
  penstock view /data/queue                                   the storage of a TransferQueue: prints its first rows
  penstock view traces.jsonl                                  samples of a file, in any format of `penstock convert`

The page is served on 127.0.0.1 only, needs the token in the printed URL, and is read-only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.commands.which_run import RUN_HELP, checked_where, export_folder
from penstock.errors import ConfigError, CorruptFile, InvalidInput
from penstock.integrations.transfer_queue.journal import RUN, Kept, Place, parse_place, read_history
from penstock.integrations.transfer_queue.typed_cells import VALUE, decode_value
from penstock.packing import pack
from penstock.storage import Gone, KeptStorage, is_object_url, open_storage, read_marker
from penstock.transport import MAX_PORT
from penstock.view import (
    Export,
    Library,
    TokenExporter,
    is_run_folder,
    new_token,
    open_vocabulary,
    run_folders,
    viewer,
    write_page,
)

_MOST = 2_000
"""Samples shown of a file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="RUN", type=checked_where, help=f"{RUN_HELP}; the folder given to TokenExporter; or a file"
    )
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--tokenizer", type=Path, help="a folder with tokenizer.json; by default the run's own")
    parser.add_argument(
        "--assets", type=Path, help="the asset store with the samples' images; by default the run's own"
    )
    parser.add_argument("--assets-run", default="local", help="the run the images were stored under")
    parser.add_argument("--port", type=port, default=0, help="on 127.0.0.1; a free one by default")
    parser.add_argument("--no-open", action="store_true", help="only print the URL")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained file instead")
    parser.add_argument("--run", dest="of_run", help="for --html: the run, if the folder holds several")
    parser.add_argument("--step", type=int, help="for --html: the step (default: the last)")
    parser.add_argument("--sample", type=int, help="for --html: only this sample, by its index in the list")


def port(text: str) -> int:
    """Parse a port for argparse."""
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text}; must be from 0 (a free port) to {MAX_PORT}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    if is_queue(args.folder):
        print("\n".join(queue_lines(args.folder)))
        return 0
    if Path(args.folder).is_file():
        with tempfile.TemporaryDirectory(prefix="penstock-view-") as folder:
            return _show(export_file(args.folder, Path(folder)), args)
    return _show(export_folder(args.folder, args.keys), args)


def export_file(word: str, folder: Path) -> Path:
    """Export the first samples of a file as one step, and return the export's folder."""
    from penstock.integrations.formats.file_formats import read_samples
    from penstock.integrations.formats.sample_files import own_columns_of
    from penstock.integrations.formats.shared import Lost

    lost, exported = Lost(), folder / Path(word).stem
    rows = read_samples(word, lost)
    samples = list(itertools.islice(rows, _MOST))
    if not samples:
        raise InvalidInput(f"{word}: no samples in it; see `penstock convert --formats` for what can be read")
    more = "the first " if next(rows, None) is not None else ""
    own = own_columns_of(samples).values()
    step = pack(samples, ranks=1, seq_len=max(sample.num_tokens for sample in samples), columns=list(own))
    with TokenExporter(exported) as exporter:
        for batch in step.ranks[0]:
            exporter.write(1, batch, None)
        exporter.close_step(1)
    unread = ", ".join(f"{name} ({count:,})" for name, count in sorted(lost.unread.items()))
    print(f"{more}{len(samples):,} samples of {word}{f'; not read: {unread}' if unread else ''}", file=sys.stderr)
    return exported


def _show(folder: Path, args: argparse.Namespace) -> int:
    if args.html is None and run_folders(folder):
        return serve(open_library({}, args, of=folder), args)
    library = open_library({folder.name or "run": folder}, args)
    if args.html is None:
        return serve(library, args)
    size = write_page(args.html, library, run=args.of_run, step=args.step, sample=args.sample)
    print(f"{args.html}: {size / 1e6:.1f} MB")
    return 0


def open_library(folders: dict[str, Path], args: argparse.Namespace, of: Path | None = None) -> Library:
    """Open the exports in these folders, or with `of` those in a folder of runs."""
    exports = {name: Export(folder, awaited=is_run_folder(folder)) for name, folder in folders.items()}
    vocabulary = None if args.tokenizer is None else open_vocabulary(args.tokenizer)
    images = None
    if args.assets is not None:
        if not args.assets.is_dir():
            raise ConfigError(f"{args.assets}: not a folder; give the folder of the asset store")
        from penstock.assets import AssetStore

        images = AssetStore(args.assets, run=args.assets_run)
    return Library(exports=exports, folder=of, vocabulary=vocabulary, images=images, assets_run=args.assets_run)


def _names(library: Library) -> str:
    """Name what is served.

    >>> _names(Library())
    'no runs'
    """
    names = list(library.exports)
    return ", ".join(names) if 0 < len(names) < 5 else f"{len(names) or 'no'} runs"


def serve(library: Library, args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    token = new_token()
    server = viewer(library, token=token, port=args.port)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(server):
        url, port = f"{server.url}/?token={token}", server.url.rpartition(":")[2]
        print(
            f"{url}\nServing {_names(library)} to this machine only; Ctrl-C ends it.\n"
            f"From another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then open the same address "
            "there. The port before the first colon may be another one.",
            flush=True,
        )
        if not args.no_open and sys.stdout.isatty() and (sys.platform == "darwin" or os.environ.get("DISPLAY")):
            webbrowser.open(url)
        server.run()
    return 0


# ------------------------------------------------------------------ the storage of a TransferQueue


_MAX_ROWS = 20
_MAX_VALUES, _MAX_VALUE_BYTES = 8, 1 << 16
_MAX_TEXT = 100


def is_queue(where: str) -> bool:
    """Check whether an address is the storage of a queue."""
    if not is_object_url(where) and not (Path(where) / "marker").is_file():
        return False
    with contextlib.closing(open_storage(where, create=False)) as storage:
        try:
            found = read_marker(storage)
        except CorruptFile:
            return False
        return found is not None and found.run == RUN


def queue_lines(where: str) -> Iterator[str]:
    """Yield the lines to print. Shows at most `_MAX_ROWS` rows, and cuts each value to one line."""
    with contextlib.closing(open_storage(where, create=False)) as storage:
        history = read_history(storage)
        rows = [(partition, key, kept) for partition, keys in history.rows.items() for key, kept in keys.items()]
        counts = ", ".join(f"{partition} {len(keys):,}" for partition, keys in history.rows.items() if keys)
        yield f"{storage.url}: {len(rows):,} keys{f' ({counts})' if counts else ''}"
        if history.keyless:
            yield f"{len(history.keyless):,} rows without a key are not shown"
        yield from (f"not readable: {text}" for text in itertools.islice(history.damaged, _MAX_ROWS))
        for partition, key, kept in rows[:_MAX_ROWS]:
            yield _cut(f"\n{partition} {key if key.isprintable() else repr(key)}  {decode_value(kept.tag)!r}", 200)
            yield from _columns(storage, kept)
        if len(rows) > _MAX_ROWS:
            yield f"\n{len(rows) - _MAX_ROWS:,} more keys are not shown"


def _columns(storage: KeptStorage, kept: Kept) -> Iterator[str]:
    places = {name: parse_place(text) for name, text in kept.columns.items()}
    width = max((len(name) for name in places), default=0)
    for name, place in places.items():
        shape = f"{place.cell.kind}{list(place.cell.shape)}" if place.cell.kind != VALUE else VALUE
        yield _cut(f"  {name if name.isprintable() else repr(name):{width}}  {shape:16}  {_values(storage, place)}")


def _values(storage: KeptStorage, place: Place) -> str:
    """Return the first values of a column as text."""
    cell = place.cell
    if cell.kind == VALUE and cell.size > _MAX_VALUE_BYTES:
        return f"({cell.size:,} bytes)"
    try:
        dtype = np.dtype("uint8" if cell.kind == VALUE else cell.kind)
    except TypeError:  # bfloat16 and others that numpy does not have
        return f"({cell.size:,} bytes)"
    data = np.empty(cell.size if cell.kind == VALUE else min(cell.size, _MAX_VALUES * dtype.itemsize), np.uint8)
    try:
        storage.read_into([(place.location, place.start, data.data)])
    except Gone:  # cleared since the journal was read
        return "(cleared)"
    if cell.kind == VALUE:
        return repr(decode_value(data))
    more = " ..." if cell.size > len(data) else ""
    return " ".join(str(value) for value in data.view(dtype).tolist()) + more


def _cut(text: str, most: int = _MAX_TEXT) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
