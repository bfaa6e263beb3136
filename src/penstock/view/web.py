"""The viewer's server: JSON from a library, images, a stream of changes, and the static page."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import InvalidInput, InvalidReference, MissingAsset, PenstockError, UnknownKey
from penstock.extras import require
from penstock.server import HttpServer
from penstock.view.access import Guard, new_token
from penstock.view.library import Library
from penstock.view.live import events, parse_read
from penstock.view.runs_table import runs_table

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
    """Return the requested rule and its thresholds."""
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
