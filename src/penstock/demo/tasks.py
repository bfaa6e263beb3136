"""The demo's tasks: prompts, verifiable rewards and the tiny model that learns each of them.

reverse    prompt      <bos> c a b =
           completion  b a c <eos>
color      see `penstock.demo.color`, which needs torch and Pillow
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ImageSpan
from penstock.capture import Turn
from penstock.convert import Rollouts, Std, grpo
from penstock.train import ModelConfig, TaskConfig

LETTERS = "abcdefgh"
REVERSE = ("<pad>", "<bos>", "<eos>", "=", *LETTERS)
"""The vocabulary of the text task; a token's id is its position."""
COLORS = {
    "red": (220, 30, 30),
    "green": (30, 180, 30),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
    "purple": (150, 40, 170),
    "white": (245, 245, 245),
}
SHAPES = ("square", "circle", "triangle")
SPECIAL = ("<pad>", "<bos>", "<eos>", "<vision_start>", "<vision_end>", "<image>", "<video>")
COLOR = (*SPECIAL, "what", "color", "is", "the", "?", *COLORS, *SHAPES)
"""The vocabulary of the image task."""
_SPACE = "▁"
PAD, BOS, EOS = 0, 1, 2
_ID = {token: i for i, token in enumerate(REVERSE)}


def standardized(rollouts: Rollouts, /) -> NDArray[np.float64]:
    """GRPO's advantage divided by the group's spread, so that small differences late in training still count."""
    return grpo(rollouts, scale=Std(eps=1e-4))


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    """Equal prompts have equal names. The correct answer follows from the name."""
    token_ids: list[int]
    image: ImageSpan | None = None


class Task(ABC):
    """Prompts of one length, and a verifiable reward."""

    name: str
    eos: int
    banned: tuple[int, ...] = ()
    """Ids that must never be sampled."""
    max_new_tokens: int
    advantage = staticmethod(standardized)

    @abstractmethod
    def prompt(self, rng: random.Random) -> Prompt:
        """Make a prompt."""

    @abstractmethod
    def answer(self, name: str) -> list[int]:
        """Return the ids of the correct answer to a prompt, without <eos>."""

    def reward(self, prompt: Prompt, completion: list[int]) -> float:
        """Return the share of correct positions, <eos> included.

        Special tokens other than <eos> count as wrong ones. A reward that skipped them would be hacked by writing
        them.
        """
        want = [*self.answer(prompt.name), self.eos]
        return sum(a == b for a, b in zip(completion, want, strict=False)) / max(len(want), len(completion))

    def turn(self, prompt: Prompt) -> Turn:
        """Return the prompt as a turn, with its image."""
        return Turn(prompt.token_ids, role="user", images=[] if prompt.image is None else [prompt.image])

    def model_inputs(self, prompts: list[Prompt], model: Any) -> dict[str, Any]:  # noqa: ARG002
        """Return what the model needs with the prompts besides their ids."""
        return {}


class ReverseTask(Task):
    """Write a word backwards. Learnable from random weights in a minute."""

    name = "reverse"
    eos = EOS

    def __init__(self, letters: int, preamble: int = 0) -> None:
        self.letters, self.max_new_tokens = letters, letters + 2
        self._opening = [BOS] * (1 + preamble)

    def prompt(self, rng: random.Random) -> Prompt:
        word = "".join(rng.choice(LETTERS) for _ in range(self.letters))
        return Prompt(word, [*self._opening, *(_ID[c] for c in word), _ID["="]])

    def answer(self, name: str) -> list[int]:
        return [_ID[c] for c in reversed(name)]


REVERSE_MODEL = {
    "vocab_size": len(REVERSE),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
"""99,584 parameters."""


def make_task(config: TaskConfig, folder: Path) -> Task:
    """Return the task of a run. Image tasks store their images in the run's folder."""
    if config.name == "reverse":
        return ReverseTask(config.letters, config.preamble)
    from penstock.demo.color import ColorTask

    return ColorTask(folder, config.preamble)


def model_of(name: str) -> ModelConfig:
    """Return the tiny model that learns a task."""
    if name == "reverse":
        return ModelConfig(family="qwen3", config=dict(REVERSE_MODEL))
    from penstock.demo.color import MODEL, PROCESSOR, ColorTask

    return ModelConfig(
        family="qwen3_vl", config=dict(MODEL), image_processor=dict(PROCESSOR), never_sampled=tuple(ColorTask.banned)
    )


def write_tokenizer(folder: Path, task: str) -> None:
    """Write `tokenizer.json` for a task's model, unless one exists: the viewer then shows text instead of ids."""
    path = folder / "tokenizer.json"
    if path.exists():
        return
    tokens = REVERSE if task == "reverse" else tuple(f"{_SPACE}{t}" if t.isalpha() else t for t in COLOR)
    model = {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<pad>"}
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}), encoding="utf-8")
