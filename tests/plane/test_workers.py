"""Work beside the loop: done in order, handled in the loop's own thread, at once or on threads."""

from __future__ import annotations

import gc
import select
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from penstock.plane.workers import Inline, Threads, Workers

PATIENCE_S = 30.0


@pytest.fixture(params=[Inline, Threads])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made: Workers = request.param()
    yield made
    made.close()


def finish_until(workers: Workers, done: Callable[[], bool]) -> None:
    """Handle results as the loop does: when the workers call."""
    while not done():
        if isinstance(workers, Threads):
            assert select.select([workers.wake.descriptor], [], [], PATIENCE_S)[0], "no result came"
        workers.finish()


def test_results_are_handled_in_order_in_the_thread_that_asks_for_them(workers: Workers) -> None:
    handled: list[tuple[int, int]] = []

    def then(result: int) -> None:
        handled.append((result, threading.get_ident()))

    for i in range(50):
        workers.submit("one", lambda i=i: i, then)  # type: ignore[misc]
    assert not handled  # not before it is asked for
    finish_until(workers, lambda: len(handled) == 50)
    assert handled == [(i, threading.get_ident()) for i in range(50)]
    assert not workers.finish()


def test_what_a_job_raises_is_its_result(workers: Workers) -> None:
    handled: list[object] = []

    def fails() -> None:
        raise ValueError("17")

    workers.submit("one", fails, handled.append)
    workers.submit("one", lambda: "the next one", handled.append)
    finish_until(workers, lambda: len(handled) == 2)
    assert isinstance(handled[0], ValueError)
    assert (str(handled[0]), handled[1]) == ("17", "the next one")


class PanicException(BaseException):
    """As extensions in Rust raise it: no `Exception`."""


def test_a_panic_in_a_job_is_its_result_and_the_next_one_runs() -> None:
    workers = Threads()
    handled: list[object] = []

    def panics() -> None:
        raise PanicException("index out of bounds")

    workers.submit("one", panics, handled.append)
    workers.submit("one", lambda: "the next one", handled.append)
    finish_until(workers, lambda: len(handled) == 2)
    workers.close()
    assert isinstance(handled[0], RuntimeError)
    assert (str(handled[0]), handled[1]) == ("PanicException: index out of bounds", "the next one")


def test_what_handling_raises_reaches_the_loop_and_loses_no_other_result(workers: Workers) -> None:
    handled: list[object] = []
    arrived = threading.Event()

    def refuse(_result: object) -> None:
        raise RuntimeError("refused")

    workers.submit("one", lambda: 1, refuse)
    workers.submit("one", lambda: 2, handled.append)
    workers.submit("one", arrived.set, handled.append)
    assert arrived.wait(PATIENCE_S)
    with pytest.raises(RuntimeError, match="refused"):
        workers.finish()
    workers.submit("one", lambda: 3, handled.append)
    finish_until(workers, lambda: len(handled) == 3)
    assert handled == [2, None, 3]


def test_a_job_may_ask_for_another_when_it_is_handled(workers: Workers) -> None:
    handled: list[object] = []

    def then(result: object) -> None:
        handled.append(result)
        workers.submit("one", lambda: "built", handled.append)

    workers.submit("one", lambda: "planned", then)
    finish_until(workers, lambda: len(handled) == 2)
    assert handled == ["planned", "built"]


def test_nothing_of_a_job_is_held_on_to_once_it_is_handled(workers: Workers) -> None:
    class Payload:
        pass

    handled: list[int] = []

    def submit() -> weakref.ref[Payload]:
        payload = Payload()
        workers.submit("one", lambda: payload, lambda _found: handled.append(1))
        return weakref.ref(payload)

    seen = submit()
    workers.submit("one", lambda: None, lambda _found: handled.append(2))  # the thread has let go of the first by then
    finish_until(workers, lambda: len(handled) == 2)
    gc.collect()
    assert seen() is None


def test_queues_do_not_wait_for_each_other() -> None:
    workers, released, handled = Threads(), threading.Event(), list[str]()
    workers.submit("steps", lambda: released.wait(PATIENCE_S), lambda _found: handled.append("steps"))
    workers.submit("intake", lambda: None, lambda _found: handled.append("intake"))
    finish_until(workers, lambda: handled == ["intake"])
    released.set()
    finish_until(workers, lambda: handled == ["intake", "steps"])
    workers.close()


def test_closing_lets_what_is_done_end_and_begins_nothing_more() -> None:
    workers, begun, done = Threads(), threading.Event(), list[str]()
    release = threading.Event()

    def first() -> None:
        begun.set()
        assert release.wait(PATIENCE_S)
        done.append("first")

    workers.submit("one", first, lambda _found: None)
    workers.submit("one", lambda: done.append("second"), lambda _found: None)
    assert begun.wait(PATIENCE_S)
    closing = threading.Thread(target=workers.close)
    closing.start()
    while not workers._closed:  # it waits for the first job from here on
        pass
    release.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert done == ["first"]
