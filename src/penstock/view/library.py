"""The viewer's data: runs of one or more folders with their steps, samples, groups, metrics and events. Read-only."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import InvalidInput, MissingAsset, PenstockError, UnknownKey
from penstock.log import plane_of
from penstock.view.folders import EXPORTS, STABLE
from penstock.view.history import Event, Noted, PlaneNotes, deaths_of, history_of, of_exports, over_steps
from penstock.view.index import StepIndex, branches, find
from penstock.view.jsonl import encode_line
from penstock.view.plane_steps import EVALUATION, dropped_of, records_of
from penstock.view.reader import Export
from penstock.view.record import Step
from penstock.view.run_files import Places, as_columns, is_written, last_written, merged, rows_since, state_of
from penstock.view.tallies import NOTHING, Summary, tally
from penstock.view.vocabulary import Vocabulary, open_vocabulary, texts

if TYPE_CHECKING:
    from penstock.assets import AssetStore

_IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_SHOWN_TOKENS = 400
"""Tokens shown of a branch of a group. The sample's page shows all."""
_KEPT_POINTS = 1 << 14
"""Points of curves held in memory: about a kilobyte each."""
_MOST_RUNS = 300
"""Runs shown of a folder of runs: those changed last. The page says how many are left out."""
_KEPT_STEPS = 4
"""Indexes held in memory: about 80 bytes per token and some hundred per sample."""


@dataclass(slots=True, kw_only=True)
class Library:
    """One or more exports by name, with a vocabulary and images for them."""

    exports: Mapping[str, Export] = field(default_factory=dict)
    """By displayed name. A diff has two."""
    folder: Path | None = None
    """A folder of runs, each an export. Runs that appear later are shown as well."""
    vocabulary: Vocabulary | None = None
    """Of all exports. Without it, each has that of its folder."""
    images: AssetStore | None = None
    """Of all exports. Without it, images are looked for in `assets` of the exports' folders."""
    assets_run: str = "local"
    """The run under which images in these folders were stored."""
    difference: dict[str, Any] | None = None
    """Where two runs first differ, when they were compared."""
    left_out: int = field(init=False, default=0)
    """Runs of the folder that are not shown."""
    _notes: dict[Path, PlaneNotes] = field(init=False, default_factory=dict)
    _vocabularies: dict[str, Vocabulary | None] = field(init=False, default_factory=dict)
    _index: Any = field(init=False)
    _points: dict[tuple[str, str, int], tuple[int, dict[str, Any]]] = field(init=False, default_factory=dict)
    """Step -> its stamp, and its points on the curves."""
    _reading: dict[tuple[str, str, int], threading.Lock] = field(init=False, default_factory=dict)
    """One lock per step: concurrent requests read a step once, and other steps are not blocked."""

    def __post_init__(self) -> None:
        self._index = lru_cache(maxsize=_KEPT_STEPS)(self._read_index)
        self._find_runs()

    def _find_runs(self) -> None:
        """Open runs that appeared in the folder, and forget those that were removed."""
        if self.folder is None:
            return
        found = run_folders(self.folder)
        self.left_out = max(len(found) - _MOST_RUNS, 0)
        shown = sorted(found.items(), key=lambda item: -_changed(item[1]))[:_MOST_RUNS]
        known = self.exports
        self.exports = {name: known.get(name) or Export(path, awaited=True) for name, path in sorted(shown)}

    # -------------------------------------------------------------- runs

    def overview(self) -> dict[str, Any]:
        """Return exports, runs, their states, and the numbers of their finished steps."""
        self._find_runs()
        return {
            "exports": [
                {"name": name, "folder": export.folder.name, "runs": [self._run(name, run) for run in runs_of(export)]}
                for name, export in self.exports.items()
            ],
            "difference": self.difference,
            "is_many": self.folder is not None,
        }

    def _run(self, export: str, run: str) -> dict[str, Any]:
        home, steps, noted = self.home(export, run), self._steps(export, run), self._noted(export, run)
        state = state_of(home) or noted.state
        found = {
            "run": run,
            "steps": [step.number for step in steps],
            "state": None if state is None else msgspec.to_builtins(state),
            "events": len(noted.events) + len(deaths_of(home)),
            "last": max((at for at in (last_written(home), noted.last, _exported_at(steps)) if at), default=None),
        }
        is_plane = run != EVALUATION and self._export(export).is_plane
        return found | ({"source": "plane"} if is_plane else {})

    def _noted(self, export: str, run: str) -> Noted:
        home = self.home(export, run)
        return Noted() if run == EVALUATION else self._notes.setdefault(home, PlaneNotes(home)).read()

    def events(self, export: str, run: str) -> list[Event]:
        """Return what happened to a run, by step."""
        self._check_run(export, run)
        noted, died = list(self._noted(export, run).events), deaths_of(self.home(export, run))
        if not noted and not died and not self._export(export).is_plane:
            return list(of_exports(self.points(export, run)["steps"]))
        if died:  # the launcher counts the kills: what the log says of them is that the process was started again
            noted = [msgspec.structs.replace(one, kind="restart") if one.kind == "kill" else one for one in noted]
        return sorted((*noted, *died), key=lambda event: (event.step, event.at or 0))

    def _steps(self, export: str, run: str, after: int = -1) -> list[Step]:
        found = self._export(export)
        return list(found.steps(run, after=after)) if not run or run in found.runs else []

    def home(self, export: str, run: str) -> Path:
        """Return the folder in which a run writes its metrics and its state."""
        folder = self._export(export).folder
        return folder / run if run and run != EVALUATION else folder

    def run(self, export: str, run: str) -> dict[str, Any]:
        """Return a run's metrics over steps: those it wrote for every step, and those of exported steps."""
        self._check_run(export, run)
        rows: list[dict[str, float | None]] = []
        places: Places = {}
        while run != EVALUATION:
            more, now = rows_since(self.home(export, run), places)
            rows += more
            if now == places:
                break
            places = now
        metrics = as_columns(merged(rows))
        found = {**self.points(export, run), "metrics": metrics, "at": places, "events": self.events(export, run)}
        return found | {"settings": self._noted(export, run).settings}

    def points(self, export: str, run: str, first: int = 0) -> dict[str, Any]:
        """Return what exported steps add to a run's curves, from step `first`. The markers of a step are read once."""
        opened = self._export(export)
        if opened.is_plane and run != EVALUATION:
            return {"steps": [step.point() for step in opened.logged() if step.number >= first]}
        return {"steps": self._points_of(export, run, self._steps(export, run, after=first - 1))}

    def last_points(self, export: str, run: str, most: int) -> list[dict[str, Any]]:
        """Return the same for the last `most` steps."""
        opened = self._export(export)
        if opened.is_plane and run != EVALUATION:
            return [step.point() for step in opened.logged()[-most:]]
        return self._points_of(export, run, self._steps(export, run)[-most:])

    def _points_of(self, export: str, run: str, steps: Iterable[Step]) -> list[dict[str, Any]]:
        found = []
        for step in steps:
            with suppress(FileNotFoundError):  # the step is being written again: it is here when it is finished
                found.append(self._point(export, run, step))
        return found

    def _point(self, export: str, run: str, step: Step) -> dict[str, Any]:
        key, stamp = (export, run, step.number), step.stamp
        known = self._points.get(key)
        if known is None or known[0] != stamp:
            known = self._points[key] = stamp, run_point(step)
            if len(self._points) > _KEPT_POINTS:
                self._points.pop(next(iter(self._points)), None)
        return known[1]

    def dropped(self, export: str, run: str) -> dict[str, Any]:
        """Return the groups that did not reach the trainer."""
        self._check_run(export, run)
        return dropped_of(self.home(export, run))

    def history(self, export: str, run: str) -> dict[str, Any]:
        """Return what became of environments and prompts over the run."""
        self._check_run(export, run)
        return history_of(self.home(export, run))

    def over_steps(self, export: str, run: str, of: str, name: str) -> dict[str, Any]:
        """Return one environment (`of` "env") or one prompt ("prompt") over the steps of a run."""
        self._check_run(export, run)
        return over_steps(self.home(export, run), of, name)

    def dropped_group(self, export: str, run: str, group: str) -> dict[str, Any]:
        """Return the rollouts of a quarantined group in the form of samples."""
        self._check_run(export, run)
        lines = [encode_line(record) for record in records_of(self.home(export, run), group)]
        return {"samples": [self._shown(export, line) for line in lines]}

    # -------------------------------------------------------------- steps

    def step(self, export: str, run: str, number: int) -> dict[str, Any]:
        """Return a step's samples, packing and summary, and the scales and histograms of its trained tokens."""
        index = self.index(export, run, number)
        return {
            "samples": index.rows,
            "summary": index.summary,
            "grid": step_grid(self._export(export).step(number, run)),
            "skipped": index.skipped.lines,
            "scales": index.tokens.scales(),
            "histograms": index.tokens.histograms(),
            "masked": index.tokens.masked(),
            "rule": index.rule,
        }

    def what_if(
        self, export: str, run: str, number: int, rule: str, thresholds: Mapping[str, float]
    ) -> dict[str, Any] | None:
        """Return what a rule would have masked in a step."""
        return self.index(export, run, number).tokens.what_if(rule, thresholds)

    def search(self, export: str, run: str, number: int, query: str) -> dict[str, Any]:
        """Find the samples that contain the query, and where."""
        index = self.index(export, run, number)
        known = self._texts(export, {int(i) for own in index.ids for i in own.tolist()})
        return {"found": find(query[:400], index.ids, known)}

    def group(self, export: str, run: str, number: int, group: str) -> dict[str, Any]:
        """Return the rollouts of a prompt as a tree, with the tokens of each branch."""
        index = self.index(export, run, number)
        members = [row["index"] for row in index.rows if (row["group_id"] or "") == group]
        if not members:
            raise UnknownKey(f"group {group[:80]!r}: not in step {number}")
        sequences = [index.ids[i] for i in members]
        found = branches(sequences)
        shown = [sequences[one.members[0]][one.start : one.end][:_SHOWN_TOKENS].tolist() for one in found]
        distinct = {i for ids in shown for i in ids}
        return {
            "members": members,
            "branches": [{**asdict(one), "ids": ids} for one, ids in zip(found, shown, strict=True)],
            "texts": self._texts(export, distinct),
        }

    def sample(self, export: str, run: str, number: int, sample: int) -> dict[str, Any]:
        """Return a sample's record as exported, the texts of its distinct ids, and the hashes of its images."""
        return self._shown(export, self.index(export, run, number).line(sample))

    def _shown(self, export: str, line: bytes) -> dict[str, Any]:
        shown = _READ.decode(line)
        return {
            "record": msgspec.Raw(line),
            "texts": self._texts(export, shown.token_ids),
            "images": [image.hash for image in shown.images or ()],
        }

    def _texts(self, export: str, ids: Iterable[int]) -> dict[int, str]:
        """Return the texts of token ids, by the tokenizer of all exports or of this one."""
        if self.vocabulary is None and export not in self._vocabularies:
            homes = [self._export(export).folder, *self._shared_homes()]
            home = next((home for home in homes if (home / "tokenizer.json").is_file()), None)
            self._vocabularies[export] = None if home is None else open_vocabulary(home)
        vocabulary = self.vocabulary or self._vocabularies[export]
        return {} if vocabulary is None else texts(vocabulary, ids)

    def _shared_homes(self) -> list[Path]:
        """Return folders with files for several exports: the folder of runs, or those of compared runs."""
        return [one.folder for one in self.exports.values()] if self.folder is None else [self.folder]

    def image(self, digest: str) -> tuple[bytes, str]:
        """Return an image and its media type. Only types that browsers never run as scripts are served."""
        store = self._store_of(digest)
        media_type = store.ref(digest).media_type
        if media_type not in _IMAGE_TYPES:
            raise InvalidInput(f"image {digest}: {media_type} is not shown")
        return store.get(digest), media_type

    def _store_of(self, digest: str) -> AssetStore:
        """Return the store with an image: the one given, or the first among the exports' that has it."""
        if self.images is not None:
            return self.images
        from penstock.assets import AssetStore

        homes = [home / "assets" for home in (*self._shared_homes(), *(one.folder for one in self.exports.values()))]
        for home in dict.fromkeys(home for home in homes if (home / "images").is_dir()):
            store = AssetStore(home, run=self.assets_run)
            with suppress(MissingAsset):
                store.ref(digest)
                return store
        raise UnknownKey(f"image {digest[:80]}: not in the runs' folders; give --assets FOLDER")

    def index(self, export: str, run: str, number: int) -> StepIndex:
        step = self._export(export).step(number, run)
        with self._reading.setdefault((export, run, number), threading.Lock()):
            found: StepIndex = self._index(export, run, number, step.stamp)
        return found

    def read_ahead(self) -> None:
        """Start reading the step the page opens with, while the browser still loads the page."""
        threading.Thread(target=self._read_first, name="penstock-read-ahead", daemon=True).start()

    def _read_first(self) -> None:
        with suppress(PenstockError, OSError):  # the request for it reports the error
            name, export = next(iter(self.exports.items()), ("", None))
            if export is None:
                return
            run = runs_of(export)[0]
            state, steps = state_of(self.home(name, run)), self._steps(name, run)
            if steps and (state is None or state.state != "running"):
                self.index(name, run, steps[-1].number)

    def _read_index(self, export: str, run: str, number: int, _: int) -> StepIndex:
        return StepIndex.of(self._export(export).step(number, run))

    def _export(self, name: str) -> Export:
        if name not in self.exports:
            raise UnknownKey(f"export {name[:80]!r}: there are {', '.join(self.exports)}")
        return self.exports[name]

    def _check_run(self, export: str, run: str) -> None:
        found = self._export(export)
        if run not in runs_of(found):
            found.choose(run)  # raises, with the ones there are
            raise UnknownKey(f"run {run[:80]!r}: no metrics, state or exports found")


class _Image(msgspec.Struct):
    hash: str


class _Shown(msgspec.Struct):
    token_ids: list[int]
    images: list[_Image] | None = None


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(_Shown)


def runs_of(export: Export) -> list[str]:
    """Return the names of a folder's runs, including those with metrics but no export. Never empty."""
    exported = export.runs
    named = sorted(p.name for p in export.folder.iterdir() if p.is_dir() and p.name != EXPORTS and is_written(p))
    own = [""] if "" in exported or is_written(export.folder) or state_of(export.folder) is not None else []
    others = [name for name in dict.fromkeys((*exported, *named)) if name]
    return [*own, *sorted(others, key=lambda name: (name == EVALUATION, name))] or [""]


def run_folders(folder: Path) -> dict[str, Path]:
    """Return the runs in a folder of runs, by name. Empty if the folder is itself a run."""
    if _is_run(folder):
        return {}
    return {path.name: path for path in folder.glob("*") if path.is_dir() and _is_run(path)}


def _is_run(path: Path) -> bool:
    return (path / EXPORTS).is_dir() or is_written(path) or state_of(path) is not None or plane_of(path) is not None


def _exported_at(steps: Sequence[Step]) -> float | None:
    """Return when the last of the exported steps was finished; None for steps that were not exported."""
    with suppress(OSError):
        return (steps[-1].path / STABLE).stat().st_mtime if steps else None
    return None


def _changed(path: Path) -> float:
    with suppress(OSError):
        return max(path.stat().st_mtime, last_written(path) or 0.0)
    return 0.0


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder is or contains a run, which may not have exported anything yet."""
    return _is_run(folder) or bool(run_folders(folder))


def step_grid(step: Step) -> list[dict[str, Any]]:
    """Return each rank's micro-batches as exported. Empty for exports without markers."""
    return [
        {"rank": rank, "micro_batches": done.micro_batches, "records": done.records, "skipped": done.skipped}
        for rank, done in step.done().items()
    ]


def run_point(step: Step) -> dict[str, Any]:
    """Return the points of one exported step on a run's curves."""
    marks = list(step.done().values())
    sums = [mark.summary for mark in marks if mark.summary is not None]
    is_known = bool(marks) and len(sums) == len(marks)
    summary = (reduce(Summary.plus, sums, NOTHING) if is_known else tally(step.records())).as_dict()
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
        "idle": None if summary["idle"] is None or not summary["records"] else summary["idle"] / summary["records"],
        **{name: summary[name] for name in ("reward", "mismatch_kl", "entropy", "loss", "staleness", "length")},
        "metrics": {name: value for mark in marks for name, value in mark.metrics.items()},
        "attempt": marks[0].attempt if marks else "",
        "again": bool(marks) and any(step.path.glob("rank_0.*.1")),
    }
