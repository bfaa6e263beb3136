"""A plane that dies gives every rank the same error, whatever each of them was doing."""

from __future__ import annotations

from penstock.errors import Closed, PenstockError, StepAborted, StorageError
from penstock.serve.clients.source import Source
from penstock.serve.clients.source_settings import SourceSettings
from penstock.testing.groups import named_group
from tests.serve.conftest import FAST, OpenPlane
from tests.serve.test_plane import close, put, sources, together
from tests.serve.test_plane_failures import NonsenseClient


def failing(plane: object, text: str) -> None:
    """Let the next turn of the plane's loop end it."""

    def end(_now: float) -> None:
        raise StorageError(text)

    server = plane._server  # type: ignore[attr-defined]
    server.turn = end


def raised(act: object) -> PenstockError:
    assert callable(act)
    try:
        act()
    except PenstockError as error:
        return error
    raise AssertionError("nothing was raised")


def test_every_rank_of_a_dying_plane_gets_the_same_words(open_plane: OpenPlane) -> None:
    for attempt in range(5):
        plane = open_plane(ranks=4)
        ranks = sources(plane, 4)
        put(plane, "a", "b")
        together(*(source.step for source in ranks))
        failing(plane, f"attempt {attempt}")
        found = together(*(lambda source=source: raised(lambda: source.step(timeout=60)) for source in ranks))
        words = f"step 1: the plane: the plane ended: StorageError: attempt {attempt}"
        assert {(type(error), str(error)) for error in found} == {(StepAborted, words)}
        close(ranks)


def test_a_rank_that_had_not_joined_yet_gets_the_words_of_the_others(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=2)
    first = plane.source(0, world=2)
    failing(plane, "no more")
    late = plane.source(1, world=2)
    errors = [raised(lambda source=source: source.step(timeout=60)) for source in (first, late)]
    assert {str(error) for error in errors} == {"step 1: the plane: the plane ended: StorageError: no more"}
    assert "the plane in this process ended: no more" in str(raised(lambda: plane.put(named_group("a"))))
    close([first, late])


def test_ranks_of_a_plane_that_is_closed_in_order_are_told_that(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=2)
    ranks = sources(plane, 2)
    plane.close()
    found = together(*(lambda source=source: raised(lambda: source.step(timeout=60)) for source in ranks))
    assert {(type(error), str(error)) for error in found} == {(Closed, "the plane in this process was closed")}
    close(ranks)


def test_a_rank_that_fails_while_it_fills_gives_all_the_same_words(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=2)
    for attempt in range(8):
        good = plane.source(0, world=2)
        bad = Source(NonsenseClient(plane._connect()), SourceSettings(rank=1, world=2, timeouts=FAST))
        put(plane, f"a{attempt}", f"b{attempt}")

        def take(source: Source) -> str:
            with source:  # as a trainer does: whoever fails leaves at once
                source.step(timeout=60)
            return "nothing was raised"

        found = together(*(lambda source=source: str(raised(lambda: take(source))) for source in (good, bad)))
        assert len(set(found)) == 1, found
        assert "step 1: rank 1: CorruptFrame" in str(found[0])
