"""Which images a step adds. Sender and receiver use the same rule.

A renderer reports all images of a prompt at every step. Sending all of them each turn would be quadratic, so a step
sends only what its baseline, the branch it continues, does not have. Two rules make that safe:

- Both sides use one baseline rule: the active branch with the *longest* token prefix of this prompt. With "first that
  fits" on one side and "longest" on the other, images get lost or duplicated.
- Images are counted, not collected in a set: the same screenshot in two places is two entries.

A step that continues no active branch (a step back to an earlier state, a compacted context) starts a new sample and
sends its full set, so that every sample is complete in itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]


class Hashed(Protocol):
    @property
    def hash(self) -> str: ...


Item = TypeVar("Item", bound=Hashed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch(Generic[Item]):
    """An active branch, as its last step left it."""

    tokens: Tokens
    """Prompt and completion of its last step."""
    images: tuple[Item, ...]
    """All images in those tokens, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Generic[Item]):
    branch: int | None
    """Index of the branch this step continues; None when it starts a new sample."""
    images: tuple[Item, ...]
    """Append these to that branch's images, without removing duplicates."""


def longest_prefix(prefixes: Sequence[Tokens], prompt: Tokens) -> int | None:
    """Return the index of the longest of `prefixes` that `prompt` begins with, the earliest of equals, or None.

    >>> longest_prefix([np.array([1]), np.array([1, 2]), np.array([9])], np.array([1, 2, 3]))
    1
    """
    order = sorted(range(len(prefixes)), key=lambda i: -len(prefixes[i]))
    return next(
        (
            i
            for i in order
            if len(prefixes[i]) <= len(prompt) and np.array_equal(prefixes[i], prompt[: len(prefixes[i])])
        ),
        None,
    )


def image_delta(branches: Sequence[Branch[Item]], prompt: Tokens, images: Sequence[Item]) -> Delta[Item]:
    """Return what a step with this prompt and all these images adds to the branch it continues.

    >>> from penstock.arrays import ImageSpan
    >>> a = ImageSpan(hash="aa" * 32, grid=(1, 2, 2), offset=0, length=1)
    >>> before = Branch(tokens=np.array([7, 8]), images=(a,))
    >>> image_delta([before], np.array([7, 8, 7]), [a, a]).images == (a,)      # the second showing of one image
    True
    >>> image_delta([before], np.array([7, 9]), [a]).branch is None            # a step back: the full set again
    True
    """
    branch = longest_prefix([b.tokens for b in branches], prompt)
    if branch is None:
        return Delta(branch=None, images=tuple(images))
    # The branch shows images a a b, the prompt a a b a: every image of the branch is crossed off once, and the last a
    # is new.
    held = Counter(image.hash for image in branches[branch].images)
    added = []
    for image in images:
        if held[image.hash] > 0:
            held[image.hash] -= 1
        else:
            added.append(image)
    if held.total() > 0:  # the branch has images this prompt does not show: its tokens fit by accident
        return Delta(branch=None, images=tuple(images))
    return Delta(branch=branch, images=tuple(added))
