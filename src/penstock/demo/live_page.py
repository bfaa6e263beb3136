"""The run's page while the run goes on: the viewer in a thread of the launcher, gone with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from penstock.view import Export, Library, open_vocabulary, serving


@contextlib.contextmanager
def live_page(folder: Path) -> Iterator[str]:
    """Serve the page of the run in a folder; gives its address, which holds the token."""
    vocabulary = open_vocabulary(folder) if (folder / "tokenizer.json").is_file() else None
    library = Library(exports={folder.name or "run": Export(folder, awaited=True)}, vocabulary=vocabulary)
    if (folder / "assets").is_dir():
        from penstock.assets import AssetStore

        library.images = AssetStore(folder / "assets")
    with serving(library) as (url, _, _):
        yield url


@contextlib.contextmanager
def watched(folder: Path, *, quiet: bool) -> Iterator[None]:
    """Serve the page of a run and say where, unless nothing is to be said: then nobody would know where it is."""
    if quiet:
        yield
        return
    with live_page(folder) as url:
        print(f"Watch it: {url}", flush=True)
        yield
