"""A judge: scores what rollout workers put without rewards. The reward comes late, from another process."""

from __future__ import annotations

from pathlib import Path

from penstock.client import open as open_plane
from penstock.demo.tasks import Word, make_task
from penstock.train import TrainConfig


def judge(config: TrainConfig, url: str) -> None:
    """Score until the process is killed."""
    assert config.task is not None
    task = make_task(config.task, Path(config.folder))
    with open_plane(url, timeouts=config.timeouts) as plane:
        for lease in plane.lacking("rewards", groups=32):
            answers = {sample.id: sample.token_ids[sample.loss_mask].tolist() for sample in lease.samples}
            words = {sample.id: Word(sample.prompt, []) for sample in lease.samples}
            lease.attach({name: task.reward(words[name], answer) for name, answer in answers.items()})
