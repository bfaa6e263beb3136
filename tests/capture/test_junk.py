"""Whatever is wrong with a record, the answer is our error or a valid trajectory: never another exception."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from penstock.capture import from_chat_completions, from_rollout, from_verifiers
from penstock.convert import to_samples
from penstock.errors import PenstockError

DATA = Path(__file__).parents[1] / "data" / "verifiers"
JUNK: list[Any] = [
    None,
    -1,
    0,
    3,
    2**40,
    1.5,
    float("nan"),
    True,
    "",
    "x",
    [],
    [1],
    [[1]],
    ["x"],
    [None],
    {},
    {"x": 1},
    b"z",
]


def places(record: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a record."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in list(items):
        yield record, key
        yield from places(value)


def verifiers_record() -> Any:
    episode = json.loads((DATA / "two_turns.json").read_text())
    node = next(node for node in episode["traces"][0]["nodes"] if any(node["mask"]))
    sampled = sum(node["mask"])
    node["weight_versions"] = [{"version": "7", "start": 0, "end": sampled}]
    node["top_logprobs"] = {"ids": [3] * sampled, "logprobs": [-0.5] * sampled, "counts": [1] * sampled}
    return episode


def responses() -> Any:
    def answer(prompt: list[int], said: list[int]) -> dict[str, Any]:
        content = [{"token": f"token_id:{t}", "logprob": -0.5} for t in said]
        routed = {"data": "AA==" if len(prompt) == 1 else "AAAA", "shape": [len(prompt), 1, 1], "start": 0}
        spans = [{"version": 3, "start": 0, "end": len(said)}]
        choice = {
            "token_ids": said,
            "logprobs": {"content": content},
            "routed_experts": routed,
            "finish_reason": "stop",
        }
        return {"prompt_token_ids": prompt, "choices": [choice], "weight_versions": spans}

    return [answer([1], [2]), answer([1, 2, 3], [4])]


def rollout_record() -> Any:
    image = {"hash": "a" * 64, "grid": [1, 2, 2], "offset": 1, "length": 1}
    tokens = {
        "prompt_ids": [1, 7, 2],
        "prompt_mask": [0, 0, 0],
        "completion_ids": [3, 4],
        "completion_mask": [1, 0],
        "completion_logprobs": [-0.5, -0.25],
        "mm_token_type_ids": [0, 1, 0, 0, 0],
        "images": [image],
        "routed_experts": {"data": "AAAAAA==", "shape": [4, 1, 1], "start": 0, "dtype": "uint8"},
        "temperature": 1.0,
    }
    steps = [{"tokens": copy.deepcopy(tokens)}, {"tokens": copy.deepcopy(tokens)}]
    return {
        "example_id": 1,
        "trajectory": steps,
        "reward": 1.0,
        "error": None,
        "metrics": {"n": 1},
        "sampling_args": {},
    }


READERS: list[tuple[Callable[[], Any], Callable[[Any], list[Any]]]] = [
    (verifiers_record, from_verifiers),
    (responses, lambda record: [from_chat_completions(record)]),
    (rollout_record, lambda record: [from_rollout(record)]),
]


@pytest.mark.parametrize(
    ("make", "read"),
    [pytest.param(*READERS[0], marks=pytest.mark.deep), *READERS[1:]],
    ids=["verifiers", "chat", "rollout"],
)
def test_junk_anywhere_gives_our_error_or_a_valid_trajectory(make: Callable[[], Any], read: Any) -> None:
    assert [to_samples(rollout) for rollout in read(make())]
    rng = random.Random(0)
    every = list(places(make()))
    # All containers and scalars at least once, long lists of numbers a few times each.
    chosen = [i for i, (box, key) in enumerate(every) if not isinstance(box, list) or key in (0, 5)]
    for i in chosen:
        for junk in rng.sample(JUNK, 6):
            record = make()
            box, key = next(islice(places(record), i, None))
            box[key] = copy.deepcopy(junk)
            try:
                for rollout in read(record):
                    to_samples(rollout)
            except PenstockError:
                pass
            except Exception as error:  # noqa: BLE001 - that it is none of these is the test
                pytest.fail(f"{type(error).__name__} for {key!r} = {junk!r}: {error}")
