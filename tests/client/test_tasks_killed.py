"""Real workers and a plane that are killed: every prompt of two epochs is trained exactly once per epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.task_torture import torture_tasks

pytestmark = pytest.mark.process


def test_every_prompt_is_trained_once_per_epoch_whatever_is_killed(tmp_path: Path) -> None:
    found = torture_tasks(tmp_path, kills=4, prompts=20)
    assert found.good, found
    assert found.kills.total() == 4


def test_nothing_is_trained_unscored_and_no_score_changes_whatever_is_killed(tmp_path: Path) -> None:
    """With judges that disagree, a deadline, a filter and a staleness limit; what is dropped is made again."""
    found = torture_tasks(tmp_path, kills=3, prompts=20, kind="judged")
    assert found.good, found
    assert found.kills == {"plane": 1, "worker": 1, "judge": 1}


@pytest.mark.deep
def test_a_plain_loader_skips_and_repeats_prompts(tmp_path: Path) -> None:
    leased = torture_tasks(tmp_path / "leased", kills=12, prompts=120, seed=1)
    loader = torture_tasks(tmp_path / "loader", kills=12, prompts=120, seed=1, kind="loader")
    assert leased.good, leased
    assert loader.skipped + loader.repeated > 0, loader
