"""What a plane whose frames are with keepers must do, wherever those run, as a suite to run over yours.

    class TestMine(KeptPlaneSuite):
        def start(self, folder, **settings): return MyRun(folder, **settings)

The plane has two ranks, steps of two groups, two copies of every group and at least two nodes. Needs the `pytest`
package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pytest

import penstock as ps
from penstock.errors import Conflict, InvalidInput
from penstock.testing.groups import named_group

NAMES = [f"g{number}" for number in range(6)]
PATIENCE_S = 120.0


class KeptPlane(Protocol):
    """A plane with keepers that is up."""

    @property
    def plane(self) -> ps.Plane: ...

    def rank(self, rank: int) -> ps.Source: ...

    def close(self) -> None: ...


def kept(name: str) -> list[ps.Sample]:
    return named_group(name, samples=3, tokens=400 if name == "g3" else 12)


def digests(rank: Callable[[int], ps.Source], steps: int) -> list[list[str]]:
    """Of both ranks, each in a thread, committing every step."""

    def train(number: int) -> list[str]:
        found = []
        with rank(number) as source:
            for _ in range(steps):
                step = source.step(timeout=PATIENCE_S)
                found.append(step.digest)
                source.commit(step)
            source.flush(PATIENCE_S)
        return found

    with ThreadPoolExecutor() as pool:
        return list(pool.map(train, range(2)))


def embedded(folder: Path, names: list[str]) -> list[list[str]]:
    """The same groups through a plane that keeps frames itself."""
    with ps.open(folder, ranks=2, seq_len=512, groups_per_step=2) as plane:
        for name in names:
            plane.put(kept(name))
        return digests(plane.source, len(names) // 2)


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.05)


class KeptPlaneSuite:
    """What every plane with keepers must do."""

    def start(self, folder: Path, **settings: Any) -> KeptPlane:
        """One with `ranks=2, seq_len=512, groups_per_step=2, copies=2` and these settings."""
        raise NotImplementedError

    def test_steps_are_those_of_a_plane_that_keeps_frames_itself(self, tmp_path: Path) -> None:
        run = self.start(tmp_path)
        for name in NAMES:
            assert run.plane.put(kept(name), timeout=PATIENCE_S)
        assert digests(run.rank, 3) == embedded(tmp_path / "alone", NAMES)
        ledger = run.plane.ledger
        assert ledger.balanced and ledger.committed == ledger.accepted == 18
        run.close()

    def test_a_group_put_twice_is_one_and_with_other_content_is_refused(self, tmp_path: Path) -> None:
        run = self.start(tmp_path)
        assert run.plane.put(kept("a"), timeout=PATIENCE_S)
        assert not run.plane.put(kept("a"), timeout=PATIENCE_S)
        with pytest.raises(Conflict, match="'a'"):
            run.plane.put(named_group("a", samples=3, tokens=20), timeout=PATIENCE_S)
        assert run.plane.ledger.accepted == 3
        run.close()

    def test_every_group_is_on_two_nodes_and_forgotten_on_both(self, tmp_path: Path) -> None:
        run = self.start(tmp_path, retain_steps=0)
        for name in NAMES:
            run.plane.put(kept(name), timeout=PATIENCE_S)

        def groups() -> int:
            return sum(keeper["num_groups"] for keeper in run.plane.status()["keepers"])

        eventually(lambda: groups() == 2 * len(NAMES))
        digests(run.rank, 3)
        run.plane.put(kept("next"), timeout=PATIENCE_S)  # what is given back is written with the next decision
        eventually(lambda: groups() == 2)
        run.close()

    def test_a_group_that_cannot_be_used_is_refused_in_words_and_kept_by_nobody(self, tmp_path: Path) -> None:
        run = self.start(tmp_path, requires=["logprobs"])
        bare = [ps.Sample(id="b/0", group="b", token_ids=[1, 2], loss_mask=[False, True])]
        with pytest.raises(InvalidInput, match="which this plane requires"):
            run.plane.put(bare, timeout=PATIENCE_S)
        with pytest.raises(InvalidInput, match="other"):
            run.plane.put_frame("other", ps.encode(kept("a")), timeout=PATIENCE_S)
        eventually(lambda: not any(keeper["num_groups"] for keeper in run.plane.status()["keepers"]))
        run.close()

    def test_evaluation_groups_are_kept_too(self, tmp_path: Path) -> None:
        run = self.start(tmp_path)
        run.plane.put(kept("e"), evaluation=True, timeout=PATIENCE_S)
        assert run.plane.ledger.evaluation == 3
        run.close()
