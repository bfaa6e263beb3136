"""A connection that fails while it is made leaves no socket behind.

ZeroMQ's context waits for its sockets when it is collected, without limit and in whichever thread the collector runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import penstock as ps
from penstock.errors import InvalidInput, PenstockError
from tests.support.ports import free_port

NOBODY = "tcp://127.0.0.1:9"
SMALL: dict[str, Any] = {"ranks": 1, "seq_len": 16, "groups_per_step": 1}


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    before = _open_contexts()
    yield
    left = [context for context in _open_contexts() if context not in before]
    for context in left:
        context.destroy(0)  # or the collector would hang in a later test
    assert not left


def _open_contexts() -> list[zmq.Context[Any]]:
    return [one for one in gc.get_objects() if isinstance(one, zmq.Context) and not one.closed]


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    "connect",
    [
        lambda: ps.connect(NOBODY, rank="0", world=1),  # type: ignore[arg-type]
        lambda: ps.connect(NOBODY, rank=1, world=1),
        lambda: ps.connect(NOBODY, rank=0, world=1, resume_step=0),
        lambda: ps.connect(NOBODY, rank=0, world=1, timeouts=5),  # type: ignore[arg-type]
        lambda: ps.connect(NOBODY, rank=0, world=1, run=3),  # type: ignore[arg-type]
        lambda: ps.connect(NOBODY, rank=0, world=1, run="x" * 10_000),
        lambda: ps.open(NOBODY, timeouts=5),  # type: ignore[arg-type]
        lambda: ps.open(NOBODY, run=3),  # type: ignore[arg-type]
        lambda: ps.open(NOBODY, run="x" * 10_000),
        lambda: ps.connect(f"ipc:///tmp/{'x' * 200}", rank=0, world=1),
        lambda: ps.open("memory:", listen=["tcp://127.0.0.1:*", "tcp://127.0.0.1"], **SMALL),
        lambda: ps.open("memory:", listen=["tcp://127.0.0.1:*", "http://127.0.0.1:1"], **SMALL),
        lambda: ps.open("memory:", listen=[f"ipc:///tmp/{'x' * 200}"], **SMALL),
    ],
)
def test_a_wrong_argument_is_our_error_and_leaves_no_socket(connect: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput):
        connect()


@pytest.mark.usefixtures("leaves_nothing")
def test_a_plane_that_cannot_start_lets_its_port_go(tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with ps.open(tmp_path, listen=[url], env_weights={"math": 1.0}, **SMALL):
        pass
    with pytest.raises(PenstockError, match="env_weights"):
        ps.open(tmp_path, listen=[url], shares={"a": 1.0}, **SMALL)
    with ps.open(tmp_path, listen=[url], env_weights={"math": 1.0}, **SMALL) as plane:
        assert plane.url == url
