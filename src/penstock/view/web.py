"""The viewer's server: JSON from a library, images, a stream of changes, and the static page.

Changes of watched runs are server-sent events: new steps, new metrics, run states.

    event: overview    runs, finished steps and states, when any of them changed
    event: rows        metrics one run has written since the last such event

A page that loses its connection reconnects and sends its position (`Last-Event-ID`), so it misses nothing. Files are
checked by size, and only new bytes are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import InvalidInput, InvalidReference, MissingAsset, PenstockError, UnknownKey
from penstock.extras import require
from penstock.server import HttpServer
from penstock.view.access import Guard, new_token
from penstock.view.library import Library, runs_of
from penstock.view.plane_steps import EVALUATION
from penstock.view.run_files import FILES, Places, as_columns, merged, rows_in, rows_since

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

SCRIPTS = (
    *("text", "source", "live", "scale", "rules", "charts", "lines", "curves", "filters", "list", "tokens", "side"),
    *("bar", "compare", "step", "events", "run", "groups", "prompts", "dropped", "runs", "keys", "top", "app"),
)
"""In the order in which they are joined. A page requests one file instead of twenty."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_GRACE_S = 5
"""How long a response in progress may delay shutdown."""


def make_app(library: Library, *, token: str) -> Guard:
    """Return the viewer's app behind its guard."""
    require("the viewer", "starlette", "uvicorn")
    from starlette.applications import Starlette
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    files = static_files()

    def static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return Response(status_code=404)
        return Response(files[name], media_type=_TYPES[Path(name).suffix])

    def image(request: Request) -> Response:
        data, media_type = library.image(request.path_params["digest"])
        return Response(data, media_type=media_type, headers={"content-disposition": "inline; filename=image"})

    async def news(request: Request) -> Response:
        read = parse_read(request.headers.get("last-event-id") or request.query_params.get("read", ""))
        return StreamingResponse(events(library, read, guard.closing.is_set), media_type="text/event-stream")

    routes = [Route(f"/api/{name}", _safely(_json(answer))) for name, answer in answers(library).items()]
    routes += [Route("/", static), Route("/static/{name}", static), Route("/image/{digest}", _safely(image))]
    guard = Guard(Starlette(routes=[*routes, Route("/events", news)]), token=token)
    return guard


def answers(library: Library) -> dict[str, Callable[[Request], Any]]:
    """Return the handlers of /api/NAME by name."""
    return {
        "overview": lambda _: library.overview(),
        "runs": lambda _: runs_table(library),
        "events": lambda request: library.events(*_run_of(request)),
        "run": lambda request: library.run(*_run_of(request)),
        "points": lambda request: library.points(*_run_of(request), _number(request, "first")),
        "step": lambda request: library.step(*_step_of(request)),
        "sample": lambda request: library.sample(*_step_of(request), _number(request, "sample")),
        "whatif": lambda request: library.what_if(*_step_of(request), *_rule_of(request)),
        "search": lambda request: library.search(*_step_of(request), request.query_params.get("query", "")),
        "group": lambda request: library.group(*_step_of(request), request.query_params.get("group", "")),
        "dropped": lambda request: library.dropped(*_run_of(request)),
        "history": lambda request: library.history(*_run_of(request)),
        "over_steps": lambda request: library.over_steps(
            *_run_of(request), request.query_params.get("of", ""), request.query_params.get("name", "")
        ),
        "dropped_group": lambda request: library.dropped_group(
            *_run_of(request), request.query_params.get("group", "")
        ),
    }


def static_files() -> dict[str, bytes]:
    """Return the page's files by name."""
    folder = resources.files("penstock.view") / "static"
    files = {name: (folder / name).read_bytes() for name in ("index.html", "style.css")}
    return files | {"app.js": b"\n".join((folder / f"{name}.js").read_bytes() for name in SCRIPTS)}


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    from starlette.responses import Response

    def respond(request: Request) -> Response:
        return Response(msgspec.json.encode(answer(request)), media_type="application/json")

    return respond


def _safely(respond: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Turn our errors into short responses. The server reports all others."""
    from starlette.responses import Response

    def responding(request: Request) -> Response:
        try:
            return respond(request)
        except (UnknownKey, MissingAsset) as error:
            return Response(str(error), status_code=404, media_type="text/plain")
        except (InvalidInput, InvalidReference) as error:
            return Response(str(error), status_code=400, media_type="text/plain")
        except FileNotFoundError:
            return Response("the step is being written again; reload", status_code=404, media_type="text/plain")
        except PenstockError as error:
            return Response(str(error), status_code=500, media_type="text/plain")

    return responding


def _run_of(request: Request) -> tuple[str, str]:
    return request.query_params.get("export", ""), request.query_params.get("run", "")


def _step_of(request: Request) -> tuple[str, str, int]:
    return (*_run_of(request), _number(request, "step"))


def _rule_of(request: Request) -> tuple[str, dict[str, float]]:
    given = {name: request.query_params[name] for name in ("high", "low", "threshold") if name in request.query_params}
    return request.query_params.get("rule", ""), {name: _threshold(name, text) for name, text in given.items()}


def _threshold(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InvalidInput(f"{name}: {text[:40]!r}; give a number of 0 or more")
    return value


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidInput(f"{name}: {text[:40]!r}; give a whole number of at most 18 digits")
    return int(text)


def viewer(library: Library, *, token: str, port: int = 0) -> HttpServer:
    """Return the viewer's server, which listens on the loopback address. Port 0 chooses a free one."""
    app = make_app(library, token=token)
    library.read_ahead()
    return HttpServer(
        app,
        "127.0.0.1",
        port,
        setting="--port",
        extra="view",
        ending=app.closing.set,  # open event streams would delay the shutdown
        timeout_graceful_shutdown=_GRACE_S,
    )


@contextlib.contextmanager
def serving(library: Library) -> Iterator[tuple[str, int, str]]:
    """Run the viewer in a thread. Yields its URL with the token, its port, and the token."""
    token = new_token()
    server = viewer(library, token=token).start()
    try:
        yield f"{server.url}/?token={token}", int(server.url.rpartition(":")[2]), token
    finally:
        server.close()


# ------------------------------------------------------------------ a stream of changes


LOOK_S = 0.4
_REST = 20
"""Pause between looks at all runs, as a multiple of the duration of a look: a long log must not keep a CPU busy."""
_ALIVE_EVERY = 25
"""Looks without changes after which a comment keeps the connection open."""
Read = dict[str, Places]
"""By export and run: how far its files have been read."""
# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(Read)


class Watch:
    """Remembers what was sent, and returns what changed."""

    def __init__(self, library: Library, read: Read | None = None) -> None:
        self._library = library
        self._read: Read = dict(read or {})
        self._overview, self._due = b"", 0.0

    def look(self, *, at_all: bool = False) -> list[bytes]:
        """Return events for changes since the last look. `at_all` looks at all runs even before that is due."""
        found = [*self._look_at_runs()] if at_all or time.monotonic() >= self._due else []
        for export, opened in self._library.exports.items():
            for run in runs_of(opened):
                found += self._rows(export, run)
        return found

    def _look_at_runs(self) -> Iterator[bytes]:
        began = time.monotonic()
        found = self._library.overview()
        overview, known = msgspec.json.encode(found), msgspec.json.encode(_without_times(found))
        now = time.monotonic()
        self._due = now + _REST * (now - began)
        if known != self._overview:
            self._overview = known
            yield _event("overview", overview, self._read)

    def _rows(self, export: str, run: str) -> Iterator[bytes]:
        key = f"{export}\n{run}"
        if key not in self._read:  # no page has requested its curves yet
            return
        rows, now = rows_since(self._library.home(export, run), self._read[key])
        if now == self._read[key]:
            return
        self._read[key] = now
        if rows:
            data: dict[str, Any] = {"export": export, "run": run, "metrics": as_columns(rows)}
            yield _event("rows", msgspec.json.encode(data), self._read)


def _without_times(overview: dict[str, Any]) -> list[Any]:
    """Return the part of an overview whose changes are sent. A page learns of new metrics from the rows."""
    runs = [(one["name"], run) for one in overview["exports"] for run in one["runs"]]
    return [(name, {key: value for key, value in run.items() if key != "last"}) for name, run in runs]


async def events(library: Library, read: Read, is_over: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield events until the client disconnects or the server shuts down."""
    watch, quiet, is_last = Watch(library, read), 0, False
    yield b"retry: 1000\n\n"
    while not is_last:
        is_last = is_over()  # checked before the last look, so that a run's end is sent before the stream closes
        try:
            found = await asyncio.to_thread(watch.look, at_all=is_last)
        except (PenstockError, OSError):  # a step is being rewritten or a folder is not there yet: try again
            found = []
        for event in found:
            yield event
        quiet = 0 if found else quiet + 1
        if quiet >= _ALIVE_EVERY:
            quiet = 0
            yield b": still here\n\n"
        if not is_last:
            await asyncio.sleep(LOOK_S)


def parse_read(text: str) -> Read:
    """Parse a page's position. Malformed text counts as the start."""
    try:
        return _READ.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _event(name: str, data: bytes, read: Read) -> bytes:
    place = msgspec.json.encode(read)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (place, name.encode(), data)


# ------------------------------------------------------------------ the table of runs


_CURVE = 60
"""Steps whose rewards are drawn beside the name."""
_REWARDS = ("train/reward", "reward")


def runs_table(library: Library) -> dict[str, Any]:
    """Return one row per run, and how many runs are left out."""
    rows = [
        _of_run(library, export["name"], run)
        for export in library.overview()["exports"]
        for run in export["runs"]
        if run["run"] != EVALUATION
    ]
    return {"runs": rows, "left_out": library.left_out}


def _of_run(library: Library, export: str, run: dict[str, Any]) -> dict[str, Any]:
    points = _rewards(library, export, run["run"])
    curve = [reward for _, reward in points if reward is not None]
    return {
        **{name: run[name] for name in ("run", "state", "last", "events")},
        "export": export,
        "step": max((step for step, _ in points), default=None),
        "reward": curve[-1] if curve else None,
        "curve": curve,
    }


def _rewards(library: Library, export: str, run: str) -> list[tuple[int, float | None]]:
    """Return (step, mean reward) of the last steps: from the run's metrics, else from its plane or its exports."""
    rows = merged(rows_in(library.home(export, run) / FILES[0]))[-_CURVE:]
    if rows:
        return [(int(row["step"] or 0), _first(row, _REWARDS)) for row in rows]
    points = library.last_points(export, run, _CURVE)
    return [(point["step"], point["reward"]["mean"] if point["reward"] else None) for point in points]


def _first(row: dict[str, float | None], names: tuple[str, ...]) -> float | None:
    return next((row[name] for name in names if row.get(name) is not None), None)
