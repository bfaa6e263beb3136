"""Groups that did not reach the trainer are listed with the reason, and shown while their frames are kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.errors import UnknownKey
from penstock.view import Export
from penstock.view.library import Library


def test_what_was_dropped_and_set_aside_is_listed_beside_a_plane_at_work(dropped_run: Path) -> None:
    found = Library(exports={"run": Export(dropped_run, awaited=True)}).dropped("run", "")
    ledger = found["ledger"]
    assert ledger["dropped"] == {"stale": 4} and ledger["quarantined"] == 1 and ledger["discarded"] == {"too long": 3}
    groups = {group["id"]: group for group in found["groups"]}
    assert set(groups) == {"old-1", "old-2", "odd"}
    old = groups["old-1"]
    assert (old["state"], old["reason"], old["samples"], old["prompt"]) == ("dropped", "stale", 2, "prompt of old-1")
    assert not old["is_kept"] and groups["odd"]["is_kept"]
    assert groups["odd"]["state"] == "quarantined" and "logprobs: this group is without it" in groups["odd"]["reason"]


def test_the_tokens_of_a_group_in_quarantine_are_shown_and_those_freeing_are_not(dropped_run: Path) -> None:
    library = Library(exports={"run": Export(dropped_run, awaited=True)})
    (shown,) = library.dropped_group("run", "", "odd")["samples"]
    record = msgspec.json.decode(bytes(shown["record"]))
    assert record["token_ids"] == [1, 2, 7, 8] and record["sample_id"] == "odd/0"
    for name in ("old-1", "first", "nobody"):
        with pytest.raises(UnknownKey, match=f"group '{name}': its frame is not stored"):
            library.dropped_group("run", "", name)


def test_a_folder_without_a_plane_says_so(tmp_path: Path) -> None:
    assert Library(exports={"x": Export(tmp_path, awaited=True)}).dropped("x", "") == {"ledger": None, "groups": []}
