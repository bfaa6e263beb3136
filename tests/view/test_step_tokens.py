"""What is said of a step's tokens as a whole equals what its records say one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput, UnknownKey
from penstock.view import Export, Record
from penstock.view.index import branches, find
from penstock.view.library import Library
from penstock.view.tallies import RULES, StepTokens, judge
from penstock.view.vocabulary import open_vocabulary
from tests.support.exports import make_export


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "run"
    make_export(path, steps=2, ranks=2, groups=8, size=3, seed=4)
    return path


@pytest.fixture(scope="module")
def library(folder: Path) -> Library:
    return Library(exports={"run": Export(folder)}, vocabulary=open_vocabulary(folder))


@pytest.fixture(scope="module")
def records(folder: Path) -> list[Record]:
    return list(Export(folder).step(2).records())


def values(records: list[Record], name: str) -> Any:
    """The trained tokens of all records that have the column."""
    return np.concatenate([r.columns[name][r.loss_mask] for r in records if name in r.columns])


def test_scales_are_percentiles_over_all_trained_tokens_of_the_step(records: list[Record], library: Library) -> None:
    scales = library.step("run", "", 2)["scales"]
    sizes = np.abs(values(records, "importance_ratio").astype(np.float64) - 1)
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    assert scales["importance_ratio"]["p95"] == pytest.approx(np.percentile(sizes, 95))
    assert scales["importance_ratio"]["max"] == pytest.approx(sizes.max())
    assert "token_ids" not in scales and "is_masked" not in scales


def test_histograms_count_every_trained_token_that_was_compared(records: list[Record]) -> None:
    tokens = StepTokens()
    for record in records:
        tokens.add(record)
    found = tokens.histograms()
    for name in ("importance_ratio", "mismatch_kl"):
        known = int(np.isfinite(values(records, name)).sum())
        assert found[name]["values"] == sum(found[name]["counts"]) == known


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_a_rule_over_a_step_masks_what_it_masks_sample_by_sample(
    records: list[Record], library: Library, rule: str, scale: float
) -> None:
    thresholds = {name: value * scale for name, value in RULES[rule].thresholds.items()}
    found = library.what_if("run", "", 2, rule, thresholds)
    assert found is not None
    sides = [(record, judge(record, rule, thresholds)) for record in records]
    masks = [(record, above | below) for record, pair in sides if pair is not None for above, below in [pair]]
    assert found["masked"] == sum(int(mask.sum()) for _, mask in masks)
    assert found["samples"] == sum(bool(mask.any()) for _, mask in masks)
    assert found["high"] == sum(int(pair[0].sum()) for _, pair in sides if pair is not None)
    both = sum(int((mask & r.columns["is_masked"]).sum()) for r, mask in masks if "is_masked" in r.columns)
    assert (found["both"], found["now_only"]) == (both, found["masked"] - both)
    assert found["in_training"] == library.step("run", "", 2)["masked"]["is_masked"]
    assert found["trained"] == sum(int(record.loss_mask.sum()) for record in records)


def test_a_rule_or_threshold_that_is_none_is_refused_by_name(library: Library) -> None:
    with pytest.raises(InvalidInput, match="rule 'nope': unknown; there are dppo"):
        library.what_if("run", "", 2, "nope", {})
    for bad in ({"high": -1.0}, {"low": float("nan")}, {"threshold": 1.0}):
        with pytest.raises(InvalidInput, match="thresholds of dppo"):
            library.what_if("run", "", 2, "dppo", bad)


def test_a_group_whose_advantages_are_all_zero_trains_nothing(tmp_path: Path) -> None:
    from penstock.arrays import Sample
    from penstock.packing import pack
    from penstock.view import TokenExporter
    from tests.support.exports import terms_of

    def sample(name: str, advantage: float, mode: str = "rl") -> Sample:
        return Sample(
            id=name, token_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -1, -1], advantages=advantage, mode=mode
        )

    batch = pack([sample("a", 0.0), sample("b", 1.0), sample("c", 0.0, "sft")], ranks=1, seq_len=16).ranks[0][0]
    with TokenExporter(tmp_path) as exporter:
        exporter.write(1, batch, terms_of(np.random.default_rng(0), batch))
        exporter.close_step(1)
    rows = Library(exports={"x": Export(tmp_path)}).step("x", "", 1)["samples"]
    assert {row["sample_id"]: row["trains"] for row in rows} == {"a": False, "b": True, "c": True}


# ---------------------------------------------------------------- trees and search


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=7))
def test_the_branches_on_the_way_to_a_rollout_are_its_tokens(sequences: list[list[int]]) -> None:
    arrays = [np.array(ids) for ids in sequences]
    found = branches(arrays)
    for member, ids in enumerate(sequences):
        path = [one for one in found if member in one.members]
        assert [(one.start, one.end) for one in path] == list(
            zip([0, *(one.end for one in path[:-1])], [one.end for one in path], strict=True)
        )
        assert path[-1].end == len(ids)
        for one in path:
            assert {tuple(sequences[m][one.start : one.end]) for m in one.members} == {tuple(ids[one.start : one.end])}
    assert all(one.parent < i for i, one in enumerate(found))


def test_a_group_is_answered_as_a_tree_with_texts(library: Library, records: list[Record]) -> None:
    found = library.group("run", "", 2, "s2-g3")
    members = [library.step("run", "", 2)["samples"][i]["sample_id"] for i in found["members"]]
    assert sorted(members) == ["s2-g3-0", "s2-g3-1", "s2-g3-2"]
    root = found["branches"][0]
    assert root["members"] == (0, 1, 2) and root["start"] == 0
    text = "".join(found["texts"][i] for i in root["ids"])
    assert text.startswith("<|im_start|>system\nYou are a careful assistant.")
    with pytest.raises(UnknownKey, match="group 'none'"):
        library.group("run", "", 2, "none")
    assert len(records) == len(library.step("run", "", 2)["samples"])


def test_tokens_are_found_by_text_and_by_ids_that_follow_one_another(library: Library, folder: Path) -> None:
    rows = library.step("run", "", 2)["samples"]
    records = list(Export(folder).step(2).records())
    ids = records[5].columns["token_ids"]
    wanted = " ".join(str(i) for i in ids[40:46])
    found = dict(library.search("run", "", 2, wanted)["found"])
    assert 5 in found and all(
        records[i].columns["token_ids"][at : at + 6].tolist() == ids[40:46].tolist() for i, at in found.items()
    )
    said = dict(library.search("run", "", 2, "Wait, LET me check")["found"])
    vocabulary = library.vocabulary
    assert vocabulary is not None and said
    for i in range(len(rows)):
        text = "".join(vocabulary.text(int(t)) or "" for t in records[i].columns["token_ids"])
        assert (i in said) == ("wait, let me check" in text.lower())
    assert library.search("run", "", 2, "no such words")["found"] == []
    assert find("", [np.array([1])], {1: "a"}) == []
