"""A long run: opening a sample looks at one step, and curves read each step's markers once."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.errors import UnknownKey
from penstock.view import Export
from penstock.view.library import Library
from tests.support.exports import make_export

_STEPS = 30
_watched: list[list[tuple[str, str]]] = []


def _hook(event: str, args: tuple[object, ...]) -> None:
    # A number is a descriptor, which was opened before.
    if _watched and event in ("os.scandir", "os.listdir", "open") and not isinstance(args[0], int):
        _watched[-1].append((event, str(args[0])))


@contextmanager
def accesses() -> Iterator[list[tuple[str, str]]]:
    """The folders listed and files opened inside the block."""
    if not hasattr(accesses, "is_hooked"):
        sys.addaudithook(_hook)
        accesses.is_hooked = True  # type: ignore[attr-defined]
    found: list[tuple[str, str]] = []
    _watched.append(found)
    try:
        yield found
    finally:
        _watched.pop()


@pytest.fixture(params=["", "lora"])
def library(tmp_path: Path, request: pytest.FixtureRequest) -> Library:
    make_export(tmp_path, steps=1, ranks=1, groups=1, size=2, run=request.param)
    exports = tmp_path / request.param / "token_exports"
    for number in range(2, _STEPS + 1):
        shutil.copytree(exports / "step_1", exports / f"step_{number}")
    return Library(exports={"": Export(tmp_path)})


def run_of(library: Library) -> str:
    return library.exports[""].runs[0]


def test_opening_a_sample_looks_at_its_step_only(library: Library) -> None:
    run = run_of(library)
    first = library.sample("", run, 7, 1)
    with accesses() as found:
        assert library.sample("", run, 7, 1) == first
    assert [Path(path).parts[-2:] for _, path in found] == [("step_7", "rank_0.jsonl")]


def test_curves_read_the_markers_of_a_step_once(library: Library) -> None:
    run = run_of(library)
    with accesses() as found:
        first = library.points("", run)["steps"]
    assert len(first) == _STEPS and len([path for _, path in found if path.endswith(".done")]) >= _STEPS
    with accesses() as found:
        assert library.points("", run)["steps"] == first
        assert library.points("", run, _STEPS)["steps"] == first[-1:]
    assert not [path for _, path in found if path.endswith(".done")]


def test_a_step_that_is_written_again_is_read_again(library: Library, tmp_path: Path) -> None:
    run = run_of(library)
    before = library.points("", run)["steps"]
    step = tmp_path / run / "token_exports/step_5"
    (step / "STABLE").unlink()
    assert [point["step"] for point in library.points("", run)["steps"]] == [n for n in range(1, _STEPS + 1) if n != 5]
    with pytest.raises(UnknownKey, match="no finished step 5"):
        library.sample("", run, 5, 0)
    marker = step / "rank_0.done"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"metrics": {"again": 1.0}}))
    (step / "STABLE").touch()
    after = library.points("", run)["steps"]
    assert "again" in after[4]["metrics"] and after[:4] == before[:4] and after[5:] == before[5:]
