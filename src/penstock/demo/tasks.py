"""What the demo can learn: tasks with prompts, rewards and, for images, what the model gets beside the tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.capture import Turn
from penstock.convert import Advantage, Rollouts, Std, grpo
from penstock.demo import reverse
from penstock.train import ModelConfig, TaskConfig


class Prompt(Protocol):
    @property
    def name(self) -> str:
        """The same whenever the prompt is."""

    @property
    def token_ids(self) -> list[int]: ...


def standardized(rollouts: Rollouts, /) -> NDArray[np.float64]:
    """GRPO's advantage divided by the group's spread: small differences late in training still count."""
    return grpo(rollouts, scale=Std(eps=1e-4))


class Task(Protocol):
    """Prompts of one length, and a verifiable reward."""

    name: str
    eos: int
    banned: tuple[int, ...]
    """Ids that must never be sampled."""
    advantage: Advantage

    @property
    def max_new_tokens(self) -> int: ...
    def prompt(self, rng: random.Random) -> Any: ...
    def reward(self, prompt: Any, completion: list[int]) -> float: ...
    def turn(self, prompt: Any) -> Turn:
        """The prompt as a turn, images included."""

    def model_inputs(self, prompts: list[Any], model: Any) -> dict[str, Any]:
        """What the model gets with the prompts beside their ids."""


class TextTask(reverse.Reverse):
    """Reverse a word."""

    advantage = staticmethod(standardized)

    def turn(self, prompt: reverse.Prompt) -> Turn:
        return Turn(prompt.token_ids, role="user")

    def model_inputs(self, prompts: list[reverse.Prompt], model: Any) -> dict[str, Any]:  # noqa: ARG002
        return {}


def make_task(config: TaskConfig, folder: Path) -> Task:
    """The task of a run; image tasks keep their images in the run's folder."""
    if config.name == "reverse":
        return TextTask(config.letters, config.preamble)
    from penstock.demo.color import ColorTask

    return ColorTask(folder, config.preamble)


def model_of(name: str) -> ModelConfig:
    """The tiny model that learns the task."""
    if name == "reverse":
        return ModelConfig(family="qwen3", config=dict(reverse.MODEL))
    from penstock.demo.color import MODEL, PROCESSOR, ColorTask

    return ModelConfig(
        family="qwen3_vl", config=dict(MODEL), image_processor=dict(PROCESSOR), never_sampled=tuple(ColorTask.banned)
    )
