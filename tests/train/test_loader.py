"""Steps, samples and segments as torch programs take them: nothing is cut by hand, no denominator is lost."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader

import penstock as ps
from penstock.client import Step
from penstock.errors import InvalidInput
from penstock.train import step_loader
from penstock.train.rank_steps import Steps
from tests.support.groups import named_group
from tests.support.planes import OpenPlane, open_plane

__all__ = ["open_plane"]


def filled(open_plane: OpenPlane, groups: int) -> ps.Plane:
    plane = open_plane(ranks=1, groups_per_step=1)
    for i in range(groups):
        plane.put(named_group(f"g{i}", tokens=6 + i))
    return plane


def test_a_loader_gives_steps_with_their_denominators(open_plane: OpenPlane) -> None:
    with filled(open_plane, 3).source(0) as source:
        for number, step in enumerate(step_loader(source, timeout=60), start=1):
            assert isinstance(step, Step) and step.number == number and step.loss_tokens == step[0].loss_tokens
            source.commit(step)
            if number == 3:
                break
        source.flush()


def test_what_a_plain_loader_would_take_apart_stays_a_step_or_is_refused(open_plane: OpenPlane) -> None:
    with filled(open_plane, 2).source(0) as source:
        step = next(iter(DataLoader(Steps(source, 60), batch_size=None)))
        assert isinstance(step, Step) and step.loss_tokens
        with pytest.raises(TypeError, match="Step"):
            next(iter(DataLoader(Steps(source, 60), batch_size=1)))


def test_workers_of_a_loader_are_refused(open_plane: OpenPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.rank_steps.get_worker_info", object)  # as it is in a worker
    with filled(open_plane, 1).source(0) as source, pytest.raises(InvalidInput, match="num_workers"):
        iter(step_loader(source).dataset)


def test_samples_come_out_of_a_source_one_by_one(open_plane: OpenPlane) -> None:
    plane = filled(open_plane, 1)
    with plane.source(0) as source:
        step = source.step(timeout=60)
        for sample, put in zip(step.samples(), named_group("g0"), strict=True):
            assert (sample.id, sample.group, sample.policy_version) == (put.id, put.group, put.policy_version)
            for name in ("token_ids", "loss_mask", "logprobs"):
                np.testing.assert_array_equal(sample[name], put[name])
            assert sample["rewards"].tolist() == [float(put["rewards"])] * put.num_tokens
        (batch,) = step
        for segment, sample in zip(batch.segments, step.samples(), strict=True):
            assert (segment.id, segment.group, segment.policy_version) == (sample.id, sample.group, 0)
            np.testing.assert_array_equal(batch["token_ids"][segment.tokens], sample.token_ids)
