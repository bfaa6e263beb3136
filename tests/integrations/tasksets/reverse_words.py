"""A taskset for tests: write a word backwards. Its tasks can be made to fail, or to ask twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from penstock.integrations.environments.verifiers_chat import ChatHarness

__all__ = ["ChatHarness", "ReverseWords"]


class Word(vf.TaskData):  # type: ignore[misc]
    word: str
    broken: bool = False


class Reverse(vf.Task[Word]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def backwards(self, trace: Any) -> float:
        """The share of letters that are where they should be."""
        if self.data.broken:
            raise RuntimeError("the grader is down")
        said, want = str(trace.last_reply or ""), str(self.data.word[::-1])
        return sum(a == b for a, b in zip(said, want, strict=False)) / max(len(said), len(want))


class Settings(vf.TasksetConfig):  # type: ignore[misc]
    broken: bool = False
    words: int = 16


class ReverseWords(vf.Taskset[Reverse, Settings]):  # type: ignore[misc]
    def load(self) -> Iterator[Reverse]:
        rng = random.Random(0)
        for _ in range(self.config.words):
            word = "".join(rng.choice("abcdefgh") for _ in range(3))
            data = Word(word=word, name=word, prompt=word, broken=self.config.broken)
            yield Reverse(data, self.config.task)
