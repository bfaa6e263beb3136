"""The image task: name the colour of a drawn shape.

    prompt      <bos> <vision_start> [4 image tokens] <vision_end> what color is the circle ?
    completion  blue <eos>

Images go into the run's asset store and travel as references. The worker and the ranks each read the pixels they need.
Vision ids are banned when sampling: a placeholder without an image would stop the trainer.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.assets import AssetStore, layout_from_config, span
from penstock.demo.tasks import COLOR, COLORS, SHAPES, Prompt, Task
from penstock.train import Materializer

_ID = {token: i for i, token in enumerate(COLOR)}
_SIDE = 64
PROCESSOR: dict[str, Any] = {
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""A 32 x 32 image becomes 16 patches, 4 tokens."""
LAYOUT = layout_from_config("qwen3_vl", PROCESSOR)
MODEL: dict[str, Any] = {
    "image_token_id": _ID["<image>"],
    "video_token_id": _ID["<video>"],
    "vision_start_token_id": _ID["<vision_start>"],
    "vision_end_token_id": _ID["<vision_end>"],
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
    eos = _ID["<eos>"]
    banned = tuple(_ID[token] for token in ("<pad>", "<vision_start>", "<vision_end>", "<image>", "<video>"))
    max_new_tokens = 3

    def __init__(self, folder: Path, preamble: int = 0) -> None:
        self._opening = [_ID["<bos>"], *([_ID["what"]] * preamble)]
        self._store = AssetStore(folder / "assets")
        self._materializer = Materializer(self._store, LAYOUT, workers=1)

    def prompt(self, rng: random.Random) -> Prompt:
        color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
        ref = self._store.put(draw(color, shape, rng))
        image = span(ref, LAYOUT, offset=len(self._opening) + 1)
        ids = [*self._opening, _ID["<vision_start>"], *[_ID["<image>"]] * image.length, _ID["<vision_end>"]]
        ids += [_ID[word] for word in ("what", "color", "is", "the", shape, "?")]
        return Prompt(f"{color} {image.hash[:12]}", ids, image)  # a unique name: no two drawings are equal

    def answer(self, name: str) -> list[int]:
        return [_ID[name.partition(" ")[0]]]

    def model_inputs(self, prompts: list[Prompt], model: Any) -> dict[str, Any]:
        """Return the pixels of the prompts' images, and a mask of the tokens that stand for them."""
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
            "mm_token_type_ids": (ids == _ID["<image>"]).int(),
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
