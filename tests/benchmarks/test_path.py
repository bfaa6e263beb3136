"""The path benchmark at a tiny size, in real processes: everything arrives, what is absent is skipped with a reason."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import path
from benchmarks.programs.inputs import CASES, add, make_groups, read_all, sums_of
from benchmarks.programs.serving import check
from benchmarks.running import Program, Wanted, WayFailed, started
from penstock.commands.bench import BENCHES

pytestmark = pytest.mark.process


def silent(_what: str) -> None:
    return


def tiny(case: str = "tiny") -> path.Setting:
    return replace(path.settings(full=False)[0], case=case, rounds=1, label=case)


def test_every_way_of_this_environment_is_measured_and_the_others_are_skipped() -> None:
    rows = path.run(full=True, progress=silent, only=[tiny("tiny")])
    found = {(row.name, row.rival_name): row for row in rows}
    assert all(row.ours for row in rows if ": " not in row.name)
    for case, transport in product(("tiny",), path.TRANSPORTS):
        name = f"{case}, 2 ranks, {transport}"
        assert (found[name, "ZeroMQ + msgpack lists"].ratio or 0) > 0
        assert found[name, "TransferQueue"].skipped == "no --rivals interpreter"
        assert found[name, "TransferQueue"].target == path.settings(full=False)[0].targets.get(transport)
        assert ", p95 " in found[name, "TransferQueue"].note
        assert "462be9a" in found[name, "462be9a, tcp"].skipped
    measured = {row.name.removeprefix("tiny, 2 ranks, direct: "): row.ours for row in rows if row.ours is not None}
    assert (measured["page faults, rank"] or 0) >= 0
    assert all(measured[f"peak memory in MB, {who}"] > 1 for who in ("plane", "rank", "producer"))
    assert measured["bytes read over bytes needed"] >= 1
    assert not multiprocessing.active_children()


def test_a_round_that_fails_says_why_and_the_program_goes_on(tmp_path: Path) -> None:
    with Program("lists", folder=tmp_path, ranks=1) as program:
        program.wait()
        with pytest.raises(WayFailed, match="KeyError: 'nothing'"):
            program.round(system="lists", case="nothing", ranks=1)
        assert program.round(system="lists", case="tiny-text", ranks=1)["seconds"] > 0


def test_a_program_that_does_not_start_is_left_out_with_its_last_words(tmp_path: Path) -> None:
    with started({"none": Wanted(module="no_such_way")}, tmp_path) as (programs, why):
        assert not programs
        assert "No module named programs.no_such_way" in why["none"]


def test_a_missing_rival_is_named_with_its_interpreter(tmp_path: Path) -> None:
    with started({"gone": Wanted(module="lists", needs="no_such_rival")}, tmp_path) as (programs, why):
        assert not programs
        assert why["gone"] == f"no_such_rival is not installed in {sys.executable}"


def test_groups_depend_on_their_number_alone_and_share_their_prompt() -> None:
    for case in (CASES["tiny"], replace(CASES["fixed"], groups=2, tokens=64)):
        one, other = make_groups(case, [0, 1], "a"), make_groups(case, [1], "b")
        assert sums_of(one[1:]) == sums_of(other) != sums_of(one[:1])
        first, second = one[0].columns["token_ids"][:2]
        assert np.array_equal(first[: case.tokens // 16], second[: case.tokens // 16])
        assert (one[0].block is None) == case.is_ragged


def test_the_sizes_are_those_of_the_targets() -> None:
    groups = make_groups(CASES["fixed"], [0], "a")
    assert (CASES["fixed"].groups, len(groups[0].samples), len(groups[0].columns["token_ids"][3])) == (32, 16, 4096)
    ragged = [len(ids) for g in make_groups(CASES["ragged"], range(8), "a") for ids in g.columns["token_ids"]]
    assert max(ragged) <= 4096
    assert len(set(ragged)) > 64
    assert path.ROUTER_BYTES == 805_306_368


def test_a_changed_value_does_not_pass_the_check() -> None:
    (group,) = make_groups(CASES["tiny"], [0], "a")
    sums = [read_all(sample) for sample in group.samples]
    check([sums_of([group])], sums)
    group.columns["routed_experts"][3][0, 0, 0] ^= 1
    with pytest.raises(ValueError, match="the ranks read"):
        check([add(sums)], [read_all(sample) for sample in group.samples])


def test_it_is_registered() -> None:
    assert "path" in BENCHES
