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
from pathlib import Path

from penstock.commands.which_run import RUN_HELP, export_folder
from penstock.errors import ConfigError, InvalidInput
from penstock.packing import pack
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
    parser.add_argument("folder", metavar="RUN", help=f"{RUN_HELP}; the folder given to TokenExporter; or a file")
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
    from penstock.integrations.transfer_queue.rows_table import is_queue, queue_lines

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
    from penstock.integrations.formats.file_or_stream import Lost
    from penstock.integrations.formats.sample_files import own_columns_of

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
