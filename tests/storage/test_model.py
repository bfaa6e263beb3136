"""The small model of storage's rules keeps its promise, and breaks it as soon as one rule is left out."""

from __future__ import annotations

import pytest

from tests.storage.model import RULES, first_broken

HISTORIES = 400


def test_every_rule_together_keeps_the_promise() -> None:
    assert first_broken("", HISTORIES) is None


@pytest.mark.release
def test_every_rule_together_keeps_the_promise_in_many_histories() -> None:
    assert first_broken("", 5_000) is None


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str) -> None:
    assert first_broken(rule, 5 * HISTORIES) is not None, RULES[rule]
