"""Pauses before a retry differ between processes, also between those that were forked."""

from __future__ import annotations

import os
import struct

import pytest

from penstock.storage import object_requests
from penstock.transport import resolving


def drawn_in_child(module: object) -> float:
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, struct.pack("d", module._JITTER.uniform(0.5, 1.0)))  # type: ignore[attr-defined]
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(ours, "rb") as pipe:
        os.close(theirs)
        (found,) = struct.unpack("d", pipe.read(8))
    return float(found)


@pytest.mark.process
@pytest.mark.parametrize("module", [object_requests, resolving])
def test_forked_processes_do_not_retry_in_step(module: object) -> None:
    assert len({drawn_in_child(module) for _ in range(3)}) == 3
