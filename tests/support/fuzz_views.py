"""Fuzz targets for what the viewer reads and answers: exported records, and requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote

from penstock.errors import PenstockError
from penstock.view.access import cookie_name
from penstock.view.diff import compare
from penstock.view.index import StepIndex
from penstock.view.jsonl import parse_line
from penstock.view.library import Library, run_point, step_grid
from penstock.view.reader import Export
from penstock.view.vocabulary import open_vocabulary
from penstock.view.web import make_app
from tests.support.exports import make_export
from tests.support.fuzz_mutation import TEXTS, Change, change_tree

_TOKEN = "t" * 43
_HOST = "127.0.0.1:1"
_SECRET = b"never to be shown"


class Records:
    """A step's files: the first line is a rank's marker (or empty), the others its records, or it is Parquet.

    Everything that reads an export reads this one: lines that are no records are skipped, and nothing but our errors
    comes out. No file outside the step's folder is read.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "secret.jsonl").parent.mkdir(parents=True, exist_ok=True)
        self._seeds = _seed_records(folder / "seed")
        self._root = folder / "export"
        self._step = self._root / "token_exports" / "step_1"
        self._step.mkdir(parents=True)
        (self._step / "STABLE").touch()

    def seeds(self) -> list[bytes]:
        return self._seeds

    def mutate(self, rng: Random, data: bytes, change: Change) -> bytes:
        lines = data.split(b"\n")
        if data[:4] == b"PAR1" or rng.random() < 0.2:
            return change(data)
        at = rng.randrange(len(lines)) if rng.random() < 0.7 else 0
        with suppress(ValueError, TypeError, RecursionError, OverflowError):
            lines[at] = json.dumps(change_tree(rng, json.loads(lines[at]), change)).encode()
            return b"\n".join(lines)
        lines[at] = change(lines[at])
        return b"\n".join(lines)

    def run(self, data: bytes) -> bool:
        for path in self._step.glob("rank_*"):
            path.unlink()
        if data[:4] == b"PAR1":
            (self._step / "rank_0.parquet").write_bytes(data)
        else:
            marker, _, lines = data.partition(b"\n")
            (self._step / "rank_0.jsonl").write_bytes(lines)
            if marker:
                (self._step / "rank_0.done").write_bytes(marker)
        try:
            return self._read()
        except PenstockError:
            return False

    def _read(self) -> bool:
        export = Export(self._root)
        step = export.step(1)
        index = StepIndex.of(step)
        for number in range(len(index.rows)):
            parse_line(index.line(number))
        step_grid(step)
        run_point(step)
        step.altered()
        if index.rows:
            found = compare(export, export)
            assert found.what == "same", found
        json.dumps([index.rows, index.summary], allow_nan=False)
        return bool(index.rows)

    def close(self) -> None:
        """Nothing is open."""


def _seed_records(folder: Path) -> list[bytes]:
    from penstock.view.parquet import records_to_parquet

    make_export(folder, steps=1, ranks=1, groups=1, size=2)
    step = Export(folder).step(1)
    lines = (step.path / "rank_0.jsonl").read_bytes().splitlines()
    short = [_shortened(line) for line in lines]
    marker = json.dumps(json.loads((step.path / "rank_0.done").read_bytes())).encode()
    records_to_parquet([parse_line(line) for line in short], folder / "x.parquet")
    return [b"\n".join([b"", *short]), b"\n".join([marker, *short]), (folder / "x.parquet").read_bytes()]


def _shortened(line: bytes, tokens: int = 4) -> bytes:
    """The record of a line with its first tokens only, so that mutations find something."""
    record = json.loads(line)
    cut = {name: value[-tokens:] if isinstance(value, list) else value for name, value in record.items()}
    return json.dumps(cut).encode()


class Queries:
    """The viewer's server: the first line is method, path and query, the others are headers.

    Answers are below 500, and never contain a file that is not shown.
    """

    def __init__(self, folder: Path) -> None:
        make_export(folder / "shown", steps=2, ranks=1, groups=1, size=1)
        make_export(folder / "shown" / "other", steps=1, ranks=1, groups=1, size=1)
        (folder / "secret").write_bytes(_SECRET)
        library = Library(
            exports={"a": Export(folder / "shown")},
            vocabulary=open_vocabulary(folder / "shown"),
            images=_images(folder / "assets"),
        )
        self._app = make_app(library, token=_TOKEN)
        self._loop = asyncio.new_event_loop()

    def seeds(self) -> list[bytes]:
        paths = ["/", "/static/app.js", f"/?token={_TOKEN}", "/api/overview", "/api/run?export=a&run="]
        paths += ["/api/step?export=a&run=&step=1", "/api/sample?export=a&run=&step=2&sample=0"]
        paths += ["/api/whatif?export=a&run=&step=1&rule=dppo&high=0.2", "/api/dropped?export=a&run="]
        paths += ["/api/search?export=a&run=&step=1&query=times", "/api/group?export=a&run=&step=1&group=s1-g0"]
        paths += [
            "/api/dropped_group?export=a&run=&group=x",
            "/api/texts?export=a&run=other&step=1&sample=0",
            f"/image/{'0' * 64}",
            "/image/..%2fsecret",
        ]
        full = (
            f"HEAD /api/overview\nhost: {_HOST}\norigin: http://{_HOST}\ncookie: {cookie_name(_TOKEN)}={_TOKEN}; a=b\n"
        )
        return [*(f"GET {path}\n".encode() for path in paths), full.encode()]

    def mutate(self, rng: Random, data: bytes, change: Change) -> bytes:
        kind = rng.randrange(4)
        if kind == 0:
            return change(data)
        lines = data.split(b"\n")
        words = lines[0].split(b"&")
        at = rng.randrange(len(words))
        name = words[at].partition(b"=")[0]
        odd = rng.choice(
            [*TEXTS, "1", "2", "999999999999999999", "-1", "1e3", "٣", "%00", "%2e%2e%2f", "..%2f..%2fsecret"]
        )
        if kind == 1:
            words[at] = name + b"=" + odd.encode("utf-8", "surrogatepass")
        elif kind == 2:
            words.append(rng.choice(words))
        else:
            words[at] = change(words[at])
        return b"\n".join([b"&".join(words), *lines[1:]])

    def run(self, data: bytes) -> bool:
        status, body = self._loop.run_until_complete(self._answer(data))
        assert status < 500, f"status {status}: {body[:300]!r}"
        assert _SECRET not in body
        return status == 200

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _answer(self, data: bytes) -> tuple[int, bytes]:
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await self._app(_scope(data), receive, send)
        status: int = sent[0]["status"]
        return status, b"".join(message.get("body", b"") for message in sent[1:])


def _scope(data: bytes) -> dict[str, Any]:
    """A request as a web server hands it over; host and cookie are right unless given."""
    first, *lines = data.split(b"\n")
    method, _, target = first.partition(b" ")
    raw_path, _, query = target.partition(b"?")
    pairs = (line.partition(b":") for line in lines if b":" in line)
    headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]
    given = {name for name, _ in headers}
    right = {b"host": _HOST.encode(), b"cookie": f"{cookie_name(_TOKEN)}={_TOKEN}".encode()}
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method.decode("latin-1"),
        "scheme": "http",
        "path": unquote(raw_path.decode("latin-1")),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": [*headers, *((name, value) for name, value in right.items() if name not in given)],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }


def _images(folder: Path) -> Any:
    from penstock.assets import AssetStore

    return AssetStore(folder, retries=0)
