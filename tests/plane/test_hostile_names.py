"""Names that are too long, that lead elsewhere, or that a terminal would act on: rejected where they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.errors import CallerError, ConfigError, InvalidInput
from penstock.plane.effect_runner import decide
from penstock.plane.telemetry import RunLogger
from penstock.protocol.messages import Discard, SettleGroup, SetWeight

PLANE: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 1}
BAD = ["..", ".", "a/b", "../x", "a\\b", "a\0b", "a\x1b[31m", "a\u202eb", "a\nb", "x" * 201]
LONG = "x" * 10_000_000


@pytest.mark.parametrize("name", BAD)
def test_a_run_is_not_named_like_a_path_or_a_terminal_code(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run: .* a name has"):
        ps.open("memory:", run=name, **PLANE)
    with pytest.raises(ConfigError, match=r"shares: .* a name has"):
        ps.open("memory:", shares={name: 1.0}, **PLANE)
    with (
        ps.open("memory:", shares={"a": 1.0}, **PLANE) as plane,
        pytest.raises(InvalidInput, match=r"a name has|has 201"),
    ):
        plane.share(name, 2.0)


def test_names_in_any_writing_are_fine() -> None:
    for name in ("run", "Versuch 7 (größer)", "実験-3", "a.b_c:d", "x" * 200):
        ps.open("memory:", run=name, **PLANE).close()


def test_names_of_ten_megabytes_are_rejected_before_they_are_sent() -> None:
    with ps.open("memory:", shares={"a": 1.0}, **PLANE) as plane:
        acts: list[Callable[[], object]] = [
            lambda: plane.discard(LONG, 1),
            lambda: plane.discard("x", 1, key=LONG),
            lambda: plane.share(LONG, 1.0),
            lambda: plane.evict(LONG, "why"),
            lambda: plane.evict("a", LONG),
            lambda: plane.settle(LONG, drop=True),
            lambda: asyncio.run(plane.adiscard(LONG, 1)),
        ]
        for act in acts:
            with pytest.raises(InvalidInput, match="10,000,000 characters; give at most") as caught:
                act()
            assert len(str(caught.value)) < 200
        plane.discard("too short", 3, key="k")
        assert plane.ledger.discarded == {"too short": 3}


@pytest.mark.parametrize(
    "message",
    [
        Discard(ticket=1, reason=LONG, samples=1),
        Discard(ticket=1, reason="x", samples=1, key=LONG),
        SettleGroup(ticket=1, group=LONG, drop=True),
        SetWeight(ticket=1, tenant=LONG, weight=1.0),
        SetWeight(ticket=1, tenant=LONG, weight=0.0),
        SetWeight(ticket=1, tenant="a/../b", weight=1.0),
    ],
    ids=["reason", "key", "group", "share", "evict", "path"],
)
def test_a_plane_rejects_them_from_clients_that_do_not_look(message: Discard | SettleGroup | SetWeight) -> None:
    engine = None  # it is not asked
    refused = decide(engine, RunLogger.__new__(RunLogger), message)  # type: ignore[arg-type]
    assert isinstance(refused, CallerError) and len(str(refused)) < 200


@pytest.mark.parametrize("setting", ["ranks", "replicas"])
def test_a_world_that_no_cluster_has_is_rejected_before_memory_is_taken(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}: 1000000000; must be a whole number from 1 to 65536"):
        ps.open("memory:", **(PLANE | {setting: 10**9}))
