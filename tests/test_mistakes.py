"""What a newcomer passes by mistake is our error, which names it and what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import InvalidInput
from tests.support.groups import named_group
from tests.support.planes import OpenPlane

new: Any = ps
"""As a program without types calls it."""
SAMPLE = ps.Sample(id="a", token_ids=[1, 2], loss_mask=[0, 1])
TURN = ps.Turn([1, 2])
TRAJECTORY = ps.Trajectory(turns=[TURN])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: new.Turn(None), "turn.token_ids: None; give a list"),
        (lambda: new.Turn("hello"), "turn.token_ids: 'hello'; give a list"),
        (lambda: new.Turn({"input_ids": [1]}), "turn.token_ids: {'input_ids'"),
        (lambda: new.Turn([1], sampled="no"), "turn.sampled: 'no'; must be True"),
        (lambda: new.Turn([1], images=None), "turn.images: None; give a list"),
        (lambda: new.Turn([1], columns=[2]), r"turn.columns: \[2\]; give values by name"),
        (lambda: new.Trajectory(turns=None), "trajectory.turns: None; give a list"),
        (lambda: new.Trajectory(turns=TURN), "trajectory.turns: Turn"),
        (lambda: new.Trajectory(turns=[TURN], id=3), "trajectory.id: 3"),
        (lambda: new.Trajectory(turns=[TURN], parents=0), "trajectory.parents: 0"),
        (lambda: new.Trajectory(turns=[TURN], keeps=1), "trajectory.keeps: 1"),
        (lambda: new.encode(None), "samples: a NoneType"),
        (lambda: new.encode(SAMPLE), "samples: a Sample; give a list"),
        (lambda: new.encode([SAMPLE, TRAJECTORY]), r"samples\[1\]: a Trajectory"),
        (lambda: new.pack([TRAJECTORY], ranks=1, seq_len=8), r"samples\[0\]: a Trajectory"),
        (lambda: new.decode(None), "frame: a NoneType; give its bytes"),
        (lambda: new.decode(Path("a.frame")), "frame: a PosixPath"),
        (lambda: new.to_torch(ps.pack([SAMPLE], ranks=1, seq_len=8)), "to_torch: a PackedStep; give a micro-batch"),
        (lambda: new.grpo(None), "rewards: None"),
        (lambda: new.DifficultyPools("hard"), "DifficultyPools: 'hard'"),
        (lambda: new.DifficultyPools({"hard": 1.0}), "DifficultyPools: {'hard'"),
        (lambda: new.TokenExporter(None), "TokenExporter: None"),
        (lambda: new.AssetStore(None), "AssetStore: None"),
        (lambda: new.connect(None, rank=0, world=1), "connect: None; give the address"),
        (lambda: new.connect(Path("runs/x"), rank=0, world=1), "connect: PosixPath"),
    ],
)
def test_a_value_of_another_kind_is_named(call: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        call()


def test_numbers_of_numpy_name_turns_and_tokens() -> None:
    turns = [ps.Turn([1, 2]), ps.Turn([3]), ps.Turn([4])]
    built = new.Trajectory(turns=turns, parents=np.array([-1, 0, 0]), keeps=np.array([0, 2, 1]))
    assert (built.parents, built.keeps) == ((-1, 0, 0), (0, 2, 1))


def test_a_tensor_that_numpy_cannot_read_names_the_remedy() -> None:
    torch = pytest.importorskip("torch")
    half = torch.tensor([-0.5], dtype=torch.bfloat16)
    for tensor in (half, torch.tensor([-0.5], requires_grad=True), [half[0]]):
        with pytest.raises(InvalidInput, match=r"turn.logprobs: not an array .*detach\(\).cpu\(\).*tensor.float\(\)"):
            ps.Turn([1], logprobs=tensor)
    graded = torch.tensor([-0.5], requires_grad=True)
    for values in (graded, [graded]):  # the second: a list per token
        with pytest.raises(InvalidInput, match=r"turn.mine: not "):
            ps.Turn([1], logprobs=[-0.5], columns={"mine": values})
    assert ps.Turn([1], logprobs=half.float()).num_sampled == 1


def test_a_step_that_is_not_the_next_one_and_a_commit_before_the_first_say_what_to_do(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    plane.put(named_group("g"))
    with plane.source(rank=0) as source:
        with pytest.raises(InvalidInput, match="last one committed is 0, the last one taken is 0"):
            source.commit(1)
        call: Any = source.step
        for wrong in (30, "1"):
            with pytest.raises(InvalidInput, match=r"the next step is 1, .* step\(timeout=SECONDS\)"):
                call(wrong, timeout=60)
        assert source.step(1, timeout=60).number == 1
