"""The viewer's server: exports as JSON, images as bytes, the page as it lies in the package. It only reads."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import ConfigError, InvalidInput, InvalidReference, MissingAsset, PenstockError, UnknownKey
from penstock.extras import require
from penstock.view.access import App, Guard
from penstock.view.index import StepIndex
from penstock.view.reader import Export, Step
from penstock.view.tally import Tally, tally
from penstock.view.vocabulary import Vocabulary, texts

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from penstock.assets import AssetStore

SCRIPTS = ("text", "source", "scale", "rules", "charts", "list", "tokens", "side", "bar", "pages", "app")
"""In the order in which they are loaded."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


@dataclass(slots=True, kw_only=True)
class Library:
    """What is shown: one or more exports by name, texts and images for them."""

    exports: Mapping[str, Export]
    """By the name shown for it; a diff has two."""
    vocabulary: Vocabulary | None = None
    images: AssetStore | None = None
    parting: dict[str, Any] | None = None
    """Where two runs first differ, when they were compared."""
    _index: Any = field(init=False)

    def __post_init__(self) -> None:
        # A step's index holds a few hundred bytes per sample; what is kept is a handful of steps.
        self._index = lru_cache(maxsize=16)(self._read_index)

    def overview(self) -> dict[str, Any]:
        """Exports, runs and the numbers of their finished steps."""
        return {
            "exports": [
                {
                    "name": name,
                    "folder": export.folder.name,
                    "runs": [{"run": run, "steps": [step.number for step in export.steps(run)]} for run in export.runs],
                }
                for name, export in self.exports.items()
            ],
            "has_text": self.vocabulary is not None,
            "has_images": self.images is not None,
            "parting": self.parting,
        }

    def step(self, export: str, run: str, number: int) -> dict[str, Any]:
        """A step's samples, packed grid and summary."""
        index = self.index(export, run, number)
        grid = step_grid(self._export(export).step(number, run))
        return {"samples": index.rows, "summary": index.summary, "grid": grid, "skipped": index.skipped.lines}

    def run(self, export: str, run: str) -> dict[str, Any]:
        """A run's curves over steps."""
        return {"steps": [run_point(step) for step in self._export(export).steps(run)]}

    def sample(self, export: str, run: str, number: int, sample: int) -> dict[str, Any]:
        """A sample's record as it was exported, the texts of its distinct ids, and the hashes of its images."""
        line = self.index(export, run, number).line(sample)
        shown = msgspec.json.decode(line, type=_Shown)
        return {
            "record": msgspec.Raw(line),
            "texts": {} if self.vocabulary is None else texts(self.vocabulary, shown.token_ids),
            "images": [image.hash for image in shown.images or ()],
        }

    def image(self, digest: str) -> tuple[bytes, str]:
        """An image and its type, one of a few that are only ever images."""
        if self.images is None:
            raise UnknownKey("images: none; give --assets FOLDER")
        media_type = self.images.ref(digest).media_type
        if media_type not in _IMAGE_TYPES:
            raise InvalidInput(f"image {digest}: {media_type} is not shown")
        return self.images.get(digest), media_type

    def index(self, export: str, run: str, number: int) -> StepIndex:
        step = self._export(export).step(number, run)
        found: StepIndex = self._index(export, run, number, step.stamp)
        return found

    def _read_index(self, export: str, run: str, number: int, _: int) -> StepIndex:
        return StepIndex.of(self._export(export).step(number, run))

    def _export(self, name: str) -> Export:
        if name not in self.exports:
            raise UnknownKey(f"export {name[:80]!r}: there are {', '.join(self.exports)}")
        return self.exports[name]


class _Image(msgspec.Struct):
    hash: str


class _Shown(msgspec.Struct):
    token_ids: list[int]
    images: list[_Image] | None = None


def step_grid(step: Step) -> list[dict[str, Any]]:
    """Per rank its micro-batches, as the exporter saw them; empty for exports without markers."""
    return [
        {"rank": rank, "micro_batches": done.micro_batches, "records": done.records, "skipped": done.skipped}
        for rank, done in step.done().items()
    ]


def run_point(step: Step) -> dict[str, Any]:
    """What the curves of a run show of one step."""
    marks = list(step.done().values())
    sums = [mark.summary for mark in marks if mark.summary is not None]
    if marks and len(sums) == len(marks):
        total = Tally()
        for own in sums:
            total.merge(own)
    else:
        total = tally(step.records())
    summary = total.as_dict()
    batches = [batch for mark in marks for batch in mark.micro_batches]
    computed = sum(batch.tokens for batch in batches)
    packed = computed - sum(batch.padding for batch in batches)
    seconds = max((mark.seconds for mark in marks if mark.seconds), default=None)
    return {
        "step": step.number,
        "tokens": summary["tokens"],
        "loss_tokens": summary["loss_tokens"],
        "waste": 1 - packed / computed if computed else None,
        "tokens_per_s": packed / seconds if seconds else None,
        "masked_fraction": summary["masked_fraction"].get("is_masked"),
        **{name: summary[name] for name in ("reward", "mismatch_kl", "entropy", "staleness", "length")},
        "metrics": {name: value for mark in marks for name, value in mark.metrics.items()},
    }


def make_app(library: Library, *, token: str, port: int) -> App:
    """The whole viewer behind its guard."""
    require("the viewer", "starlette", "uvicorn")
    from starlette.applications import Starlette
    from starlette.responses import Response
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

    answers: dict[str, Callable[[Request], Any]] = {
        "overview": lambda _: library.overview(),
        "run": lambda request: library.run(*_run_of(request)),
        "step": lambda request: library.step(*_step_of(request)),
        "sample": lambda request: library.sample(*_step_of(request), _number(request, "sample")),
    }
    routes = [Route(f"/api/{name}", _safely(_json(answer))) for name, answer in answers.items()]
    routes += [Route("/", static), Route("/static/{name}", static), Route("/image/{digest}", _safely(image))]
    return Guard(Starlette(routes=routes), token=token, port=port)


def static_files() -> dict[str, bytes]:
    """The page's files, by name."""
    folder = resources.files("penstock.view") / "static"
    names = ("index.html", "style.css", *(f"{name}.js" for name in SCRIPTS))
    return {name: (folder / name).read_bytes() for name in names}


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    from starlette.responses import Response

    def respond(request: Request) -> Response:
        return Response(msgspec.json.encode(answer(request)), media_type="application/json")

    return respond


def _safely(respond: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Our errors as short answers; what else goes wrong is the server's to report."""
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


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidInput(f"{name}: {text[:40]!r}; give a whole number of at most 18 digits")
    return int(text)


@contextlib.contextmanager
def listening(port: int) -> Iterator[tuple[socket.socket, int]]:
    """A socket on the loopback address, and its port; 0 takes a free one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
        except OSError as error:
            raise ConfigError(f"port {port}: {error.strerror}; choose another, or 0 for a free one") from None
        yield listener, int(listener.getsockname()[1])


def make_server(app: App) -> Any:
    """A uvicorn server for the app; run it with `run(sockets=[...])`. It logs no addresses: they hold the token."""
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    return uvicorn.Server(config)
