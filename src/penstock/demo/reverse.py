"""The text task: read a word, write it backwards. Verifiable, and learnable from random weights in a minute.

    prompt      <bos> c a b =
    completion  b a c <eos>

The reward is the share of positions that are right, the end included. Special tokens other than <eos> count as wrong
characters: a reward that skipped them would be hacked by writing them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.demo.words import LETTERS, REVERSE

ALPHABET, TOKENS = LETTERS, REVERSE
PAD, BOS, EOS = 0, 1, 2
_ID = {token: i for i, token in enumerate(TOKENS)}


@dataclass(frozen=True, slots=True)
class Prompt:
    word: str
    token_ids: list[int]

    @property
    def name(self) -> str:
        return self.word


class Reverse:
    """Prompts and rewards."""

    name = "reverse"
    eos = EOS
    banned: tuple[int, ...] = ()

    def __init__(self, letters: int, preamble: int = 0) -> None:
        self.letters = letters
        self._opening = [BOS] * (1 + preamble)

    @property
    def max_new_tokens(self) -> int:
        return self.letters + 2

    def prompt(self, rng: random.Random) -> Prompt:
        word = "".join(rng.choice(ALPHABET) for _ in range(self.letters))
        return Prompt(word, [*self._opening, *(_ID[c] for c in word), _ID["="]])

    def reward(self, prompt: Prompt, completion: list[int]) -> float:
        want = [*(_ID[c] for c in reversed(prompt.word)), EOS]
        right = sum(a == b for a, b in zip(completion, want, strict=False))
        return right / max(len(want), len(completion))


MODEL = {
    "vocab_size": len(TOKENS),
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
