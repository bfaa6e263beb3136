"""Deltas put together again are the images of every sample, whatever branches, step-backs and repeats there are."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import ImageSpan
from penstock.assets import Branch, image_delta, longest_prefix
from tests.support.reference import reference_delta


def image(name: int) -> ImageSpan:
    return ImageSpan(hash=f"{name:064x}", grid=(1, 2, 2), offset=0, length=1)


def ids(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(tokens, np.uint32)


def test_the_longest_prefix_wins_over_the_first() -> None:
    assert longest_prefix([ids(1), ids(1, 2, 3), ids(1, 2)], ids(1, 2, 3, 4)) == 1
    assert longest_prefix([ids(1), ids(1)], ids(1, 2)) == 0
    assert longest_prefix([ids(1, 2, 3)], ids(1, 2)) is None
    assert longest_prefix([], ids(1)) is None


def test_a_prefix_of_a_prefix_takes_the_images_of_the_longer_branch() -> None:
    short = Branch(tokens=ids(1), images=(image(1),))
    long = Branch(tokens=ids(1, 2), images=(image(1), image(2)))
    delta = image_delta([short, long], ids(1, 2, 3), [image(1), image(2), image(3)])
    assert (delta.branch, delta.images) == (1, (image(3),))


def test_the_same_image_shown_twice_is_two_entries() -> None:
    delta = image_delta([Branch(tokens=ids(1), images=(image(1),))], ids(1, 2), [image(1), image(1), image(2)])
    assert [i.hash for i in delta.images] == [image(1).hash, image(2).hash]


def test_a_step_back_to_a_stale_prefix_ships_the_full_set() -> None:
    # The branch has moved on to (1, 2); a step that continues (1) alone matches no active prefix.
    delta = image_delta([Branch(tokens=ids(1, 2), images=(image(1), image(2)))], ids(1, 9), [image(1)])
    assert (delta.branch, delta.images) == (None, (image(1),))


def test_a_branch_whose_images_are_not_all_shown_is_no_baseline() -> None:
    delta = image_delta([Branch(tokens=ids(1), images=(image(1), image(1)))], ids(1, 2), [image(1)])
    assert (delta.branch, delta.images) == (None, (image(1),))


# A conversation grows by chunks of (tokens, images); a step goes on from any state ever reached.
chunk = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=2))
walks = st.lists(st.tuples(st.integers(0, 10), chunk), min_size=1, max_size=12)


@settings(max_examples=300)
@given(walks)
def test_every_sample_ends_with_exactly_its_own_images(walk: list[tuple[int, tuple[list[int], list[int]]]]) -> None:
    states: list[tuple[list[int], list[int]]] = [([], [])]
    active: list[Branch[ImageSpan]] = []
    shipped: list[list[ImageSpan]] = []
    truth: list[Counter[str]] = []
    for back, (tokens, names) in walk:
        base_tokens, base_names = states[-1 - back % len(states)]
        state = ([*base_tokens, *tokens], [*base_names, *names])
        states.append(state)
        prompt, images = ids(*state[0]), [image(n) for n in state[1]]
        delta = image_delta(active, prompt, images)
        branch = Branch(tokens=prompt, images=tuple(images))
        if delta.branch is None:
            active.append(branch)
            shipped.append(list(delta.images))
            truth.append(Counter(i.hash for i in images))
            continue
        before = [i.hash for i in active[delta.branch].images]
        assert reference_delta(before, [i.hash for i in images]) == Counter(i.hash for i in delta.images)
        active[delta.branch] = branch
        shipped[delta.branch].extend(delta.images)
        truth[delta.branch] = Counter(i.hash for i in images)
    assert [Counter(i.hash for i in images) for images in shipped] == truth
