"""The words of the demo's tiny models, and a tokenizer file for them, so that the viewer shows text and no ids."""

from __future__ import annotations

import json
from pathlib import Path

LETTERS = "abcdefgh"
REVERSE = ("<pad>", "<bos>", "<eos>", "=", *LETTERS)
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
_SPACE = "▁"


def write_tokenizer(folder: Path, task: str) -> None:
    """Write `tokenizer.json` for a task's model, unless one is there."""
    path = folder / "tokenizer.json"
    if path.exists():
        return
    words = REVERSE if task == "reverse" else tuple(f"{_SPACE}{w}" if w.isalpha() else w for w in COLOR)
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<pad>"}
    path.write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}), encoding="utf-8")
