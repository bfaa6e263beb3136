"""The demo's tasks: prompts, verifiable rewards and the tiny model that learns each of them.

reverse    prompt      <bos> c a b =
           completion  b a c <eos>
color      prompt      <bos> <vision_start> [4 image tokens] <vision_end> what color is the circle ?
           completion  blue <eos>

Images of the color task go into the run's asset store and travel as references. The worker and the ranks each read the
pixels they need. Vision ids are banned when sampling: a placeholder without an image would stop the trainer.
"""

from __future__ import annotations

import io
import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ImageSpan
from penstock.assets import AssetStore, layout_from_config, span
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


# ------------------------------------------------------------------ color


_COLOR_ID = {token: i for i, token in enumerate(COLOR)}
_SIDE = 64
COLOR_PROCESSOR: dict[str, Any] = {
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""A 32 x 32 image becomes 16 patches, 4 tokens."""
COLOR_LAYOUT = layout_from_config("qwen3_vl", COLOR_PROCESSOR)
COLOR_MODEL: dict[str, Any] = {
    "image_token_id": _COLOR_ID["<image>"],
    "video_token_id": _COLOR_ID["<video>"],
    "vision_start_token_id": _COLOR_ID["<vision_start>"],
    "vision_end_token_id": _COLOR_ID["<vision_end>"],
    "tie_word_embeddings": True,
    "text_config": {
        "vocab_size": len(COLOR),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 8,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    },
}


class ColorTask(Task):
    """Prompts with images. The answer is the colour."""

    name = "color"
    eos = _COLOR_ID["<eos>"]
    banned = tuple(_COLOR_ID[token] for token in ("<pad>", "<vision_start>", "<vision_end>", "<image>", "<video>"))
    max_new_tokens = 3

    def __init__(self, folder: Path, preamble: int = 0) -> None:
        from penstock.train import Materializer  # loads torch

        self._opening = [_COLOR_ID["<bos>"], *([_COLOR_ID["what"]] * preamble)]
        self._store = AssetStore(folder / "assets")
        self._materializer = Materializer(self._store, COLOR_LAYOUT, workers=1)

    def prompt(self, rng: random.Random) -> Prompt:
        color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
        ref = self._store.put(draw(color, shape, rng))
        image = span(ref, COLOR_LAYOUT, offset=len(self._opening) + 1)
        ids = [
            *self._opening,
            _COLOR_ID["<vision_start>"],
            *[_COLOR_ID["<image>"]] * image.length,
            _COLOR_ID["<vision_end>"],
        ]
        ids += [_COLOR_ID[word] for word in ("what", "color", "is", "the", shape, "?")]
        return Prompt(f"{color} {image.hash[:12]}", ids, image)  # a unique name: no two drawings are equal

    def answer(self, name: str) -> list[int]:
        return [_COLOR_ID[name.partition(" ")[0]]]

    def model_inputs(self, prompts: list[Prompt], model: Any) -> dict[str, Any]:
        """Return the pixels of the prompts' images, and a mask of the tokens that stand for them."""
        import torch

        model.model.rope_deltas = None  # otherwise the model reuses the positions of the last call
        # One packed row: with prompts of 12 tokens, the image at offset 2 of prompt 1 is at 12 + 2 = 14.
        pixels = self._materializer.materialize(
            [p.image.shifted(i * len(p.token_ids)) for i, p in enumerate(prompts) if p.image is not None],
            [len(p.token_ids) for p in prompts],
        )
        ids = torch.tensor([p.token_ids for p in prompts])
        return {
            "pixel_values": torch.from_numpy(pixels.pixel_values),
            "image_grid_thw": torch.from_numpy(pixels.image_grid_thw),
            "mm_token_type_ids": (ids == _COLOR_ID["<image>"]).int(),
        }


def draw(color: str, shape: str, rng: random.Random) -> bytes:
    """Draw a shape on grey noise. Returns a PNG."""
    from PIL import Image, ImageDraw

    noise = np.random.default_rng(rng.getrandbits(32)).integers(90, 150, (_SIDE, _SIDE, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    radius = rng.randint(_SIDE // 5, _SIDE // 3)
    x, y = rng.randint(radius, _SIDE - radius), rng.randint(radius, _SIDE - radius)
    box = (x - radius, y - radius, x + radius, y + radius)
    pen = ImageDraw.Draw(image)
    if shape == "square":
        pen.rectangle(box, fill=COLORS[color])
    elif shape == "circle":
        pen.ellipse(box, fill=COLORS[color])
    else:
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=COLORS[color])
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


# ------------------------------------------------------------------ either


def make_task(config: TaskConfig, folder: Path) -> Task:
    """Return the task of a run. Image tasks store their images in the run's folder."""
    if config.name == "reverse":
        return ReverseTask(config.letters, config.preamble)
    return ColorTask(folder, config.preamble)


def model_of(name: str) -> ModelConfig:
    """Return the tiny model that learns a task."""
    if name == "reverse":
        return ModelConfig(family="qwen3", config=dict(REVERSE_MODEL))
    return ModelConfig(
        family="qwen3_vl",
        config=dict(COLOR_MODEL),
        image_processor=dict(COLOR_PROCESSOR),
        never_sampled=tuple(ColorTask.banned),
    )


def write_tokenizer(folder: Path, task: str) -> None:
    """Write `tokenizer.json` for a task's model, unless one exists: the viewer then shows text instead of ids."""
    path = folder / "tokenizer.json"
    if path.exists():
        return
    tokens = REVERSE if task == "reverse" else tuple(f"{_SPACE}{t}" if t.isalpha() else t for t in COLOR)
    model = {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<pad>"}
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}), encoding="utf-8")
