"""What became of groups: the ledger's word for each, before and after restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client.group_states import GroupState
from penstock.errors import InvalidInput
from penstock.frames import encode
from penstock.protocol import MAX_ASKED
from tests.support.groups import named_group
from tests.support.planes import FAST, OpenPlane

SETTINGS: dict[str, Any] = {
    "ranks": 1,
    "seq_len": 64,
    "groups_per_step": 1,
    "timeouts": FAST,
    "max_staleness": 1,
    "over_length": "drop",
}
WANTED = {
    "a": GroupState("committed"),
    "b": GroupState("committed"),
    "c": GroupState("scheduled"),
    "d": GroupState("held"),
    "old": GroupState("dropped", "stale"),
    "long": GroupState("dropped", "over_length"),
    "eval": GroupState("evaluation"),
    "never": GroupState("unknown"),
}


def live(plane: ps.Plane) -> None:
    """Have one group in each state."""
    plane.put_many([named_group(name, policy_version=5) for name in "ab"])
    plane.put(named_group("long", tokens=200, policy_version=5))
    plane.put(named_group("eval"), evaluation=True)
    with plane.source(0, prefetch=0) as source:
        for version in (5, 6):
            source.commit(source.step(timeout=60), policy_version=version)
        source.flush()
        plane.put(named_group("old", policy_version=0))
        plane.put_many([named_group(name, policy_version=6) for name in "cd"])
        source.step(timeout=60)


def test_each_group_has_its_state_also_after_a_restart(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", listen=[f"ipc://{tmp_path}/s"], **SETTINGS) as plane:
        assert set(plane.has(WANTED).values()) == {GroupState("unknown")}
        live(plane)
        found = plane.has(WANTED)
        assert found.pop("c").state in ("scheduled", "delivered")
        assert found == {name: state for name, state in WANTED.items() if name != "c"}
        with ps.open(plane.url, timeouts=FAST) as line:
            assert line.has(["a", "never", "a"]) == {"a": WANTED["a"], "never": WANTED["never"]}
    with ps.open(tmp_path / "run", **SETTINGS) as plane:
        found = plane.has(WANTED)
        assert found.pop("c").is_known
        assert found == {name: state for name, state in WANTED.items() if name != "c"}


def test_a_restarted_producer_puts_only_what_is_missing(open_plane: OpenPlane, tmp_path: Path) -> None:
    names = [f"g{number}" for number in range(3 * MAX_ASKED)]
    plane = open_plane(tmp_path / "run", ranks=1, capacity=10_000)
    plane.put_many(named_group(name) for name in names[::100])
    missing = [name for name, state in plane.has(iter(names)).items() if not state.is_known]
    assert missing == [name for name in names if name not in names[::100]]


def test_a_group_in_quarantine_says_why(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=2)
    plane.put_many([named_group("a"), named_group("b")])
    bare = [ps.Sample(id="odd/0", group="odd", token_ids=[1, 2, 3], loss_mask=[False, True, True], advantages=1.0)]
    plane.put_frame("odd", encode(bare))
    with plane.source(0, prefetch=0) as source:
        source.commit(source.step(timeout=60))
        source.flush()
    state = plane.has(["odd"])["odd"]
    assert (state.state, state.is_known) == ("quarantined", True)
    assert "logprobs" in state.reason
    plane.settle("odd", drop=True)
    assert plane.has(["odd"])["odd"].state == "dropped"


def test_what_cannot_be_an_id_is_rejected(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    assert plane.has([]) == {}
    with pytest.raises(InvalidInput, match="is one id; pass a list"):
        plane.has("g1")
    with pytest.raises(InvalidInput, match=r"ids\[1\] is '7'"):
        plane.has(["a", 7])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="1 to 512 characters"):
        plane.has(["x" * 513])
