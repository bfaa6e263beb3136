"""`WindowedFifo` samples in order of dispatch, and at most a window of younger items overtakes one that is missing."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import ConfigError, WaitTimeout
from penstock.replay import Fifo, Table, WindowedFifo
from penstock.testing.checks import check_selector


def test_it_conforms() -> None:
    check_selector(WindowedFifo(target_offpolicy=1, window=0.5, groups_per_step=3), num_operations=150)


def table_of(window: float, target: int = 1, groups: int = 3) -> Table:
    return Table(capacity=99, sampler=WindowedFifo(target, window, groups))


def test_strict_order_waits_for_the_oldest_and_the_window_lets_some_pass() -> None:
    for window, passing in ((0.0, 0), (0.5, 2)):
        table = table_of(window, target=2)  # 9 in flight: a window of 1 or 4, and 5 or 8 that wait are enough
        for dispatch in range(9):
            table.expect(dispatch)
        for dispatch in (1, 2) if window else ():
            table.insert(dispatch, None, dispatch=dispatch)
        assert table.may_sample(passing) if passing else True
        table.insert(5, None, dispatch=5)
        assert not table.may_sample(passing + 1)
        assert table.waits_for.startswith("dispatch 0 has not arrived")
        with pytest.raises(WaitTimeout, match="dispatch 0 has not arrived"):
            table.sample(passing + 1, timeout=0)
        table.insert(0, None, dispatch=0)
        assert table.sample(1).keys.tolist() == [0]


@pytest.mark.parametrize("seed", range(30))
def test_it_agrees_with_a_plain_list(seed: int) -> None:
    """The model lists every dispatch with what became of it, and moves a window along the list."""
    rng = np.random.default_rng(seed)
    target, groups, fraction = int(rng.integers(0, 4)), int(rng.integers(1, 5)), float(rng.choice([0.0, 0.3, 0.7, 1.0]))
    flight = (target + 1) * groups
    window = max(1, int(fraction * flight))
    enough = max(groups, flight - window)
    table, model, last = table_of(fraction, target, groups), dict[int, str](), 0
    for _ in range(120):
        kind = rng.integers(0, 6)
        missing = [one for one, state in model.items() if state == "expected"]
        if kind < 2:
            last += int(rng.integers(1, 4))
            model[last] = "expected"
            table.expect(last)
        elif kind < 4 and missing:
            one = int(rng.choice(missing))
            model[one] = "held"
            table.insert(one, None, dispatch=one)
        elif kind == 4 and missing and rng.random() < 0.3:
            one = int(rng.choice(missing))
            del model[one]
            table.unexpect(one)
        elif kind == 5:
            table = Table.restore(table.to_bytes(dump=lambda _: b""))
        allowed = plainly_allowed(dict(model), window, enough)
        assert table.may_sample(len(allowed) + 1) is False
        if allowed:
            count = int(rng.integers(1, len(allowed) + 1))
            drawing = table.drawing(undoable=True)
            assert [drawing.pick() for _ in range(len(allowed) + 1)] == [*allowed, None]
            drawing.undo()
            assert table.sample(count, timeout=0).keys.tolist() == allowed[:count]
            model |= dict.fromkeys(allowed[:count], "taken")


def plainly_allowed(model: dict[int, str], window: int, enough: int) -> list[int]:
    held = sorted(one for one, state in model.items() if state == "held")
    if len(held) >= enough:
        return held
    found = []
    for one in held:
        head = min(other for other, state in model.items() if state in ("held", "expected"))
        places = sorted(other for other in model if other >= head)
        if places.index(one) >= window:
            break
        model[one] = "taken"
        found.append(one)
    return found


def test_a_gap_stops_nothing_once_enough_wait() -> None:
    table = table_of(0.0, target=1, groups=2)  # 4 in flight, strict order: 3 that wait are enough
    for dispatch in range(20):
        table.expect(dispatch)
    for dispatch in range(1, 20):  # 0 never arrives
        table.insert(dispatch, None, dispatch=dispatch)
        if table.may_sample(2):
            table.sample(2)
    assert len(table) < 4
    table.unexpect(0)
    assert table.may_sample(len(table)) and not table.waits_for


def test_what_overtook_an_older_gap_still_counts_against_the_next_one() -> None:
    table = table_of(0.5, target=1, groups=2)  # 4 in flight: a window of 2, and 2 that wait are enough
    for dispatch in range(9):
        table.expect(dispatch)
    for pair in ((1, 2), (3, 4), (6, 7)):  # 0 and 5 are slow
        for dispatch in pair:
            table.insert(dispatch, None, dispatch=dispatch)
        assert table.sample(2, timeout=0).keys.tolist() == [*pair]
    table.insert(0, None, dispatch=0)
    assert table.sample(1, timeout=0).keys.tolist() == [0]
    table.insert(8, None, dispatch=8)
    assert not table.may_sample(1)  # 6 overtook 5, and the window has room for one
    assert "dispatch 5 has not arrived" in table.waits_for


def test_what_is_too_stale_when_it_arrives_is_no_longer_expected() -> None:
    table = Table(capacity=9, sampler=WindowedFifo(1, 0.0, 3), max_staleness=1)
    for dispatch in range(2):
        table.expect(dispatch)
    table.advance(5)
    assert table.insert("old", None, policy_version=3, dispatch=0) is None
    table.insert("new", None, policy_version=5, dispatch=1)
    assert table.sample(1, timeout=0).keys.tolist() == ["new"]


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="no groups_per_step"):
        Table(sampler=WindowedFifo(2))
    with pytest.raises(ConfigError, match="trained for ever"):
        Table(sampler=WindowedFifo(2, groups_per_step=4), remover=Fifo(), max_times_sampled=None)
    for wrong in ({"target_offpolicy": -1}, {"target_offpolicy": 1, "window": 1.5}):
        with pytest.raises(ConfigError, match="WindowedFifo"):
            WindowedFifo(**wrong)
