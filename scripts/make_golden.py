"""Write golden frames: small frames of the current format version that must decode to the same samples forever.

    .venv/bin/python scripts/make_golden.py

Existing frames are never overwritten: a frame that was once written somewhere cannot be changed any more. For
a new kind of frame add a batch here and run the script; for a new format version a new folder begins.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.arrays import ImageSpan, teacher_topk
from penstock.frames.codings import Profile
from penstock.frames.layout import VERSION
from penstock.testing.strategies import OWN_COLUMNS, values_of
from tests.support.reference import record

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / f"v{VERSION}"
DIGESTS = "digests.json"


def digest(samples: Iterable[ps.Sample]) -> str:
    """sha256 of all that the samples say, floats as their bits."""
    records = json.dumps([record(sample) for sample in samples], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(records.encode()).hexdigest()


def plain_group() -> list[ps.Sample]:
    """Four answers to one prompt, as GRPO trains them."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 151_936, 60)
    return [
        ps.Sample.from_prompt(
            id=f"p0/{i}",
            group="p0",
            env="math",
            run="golden",
            policy_version=3,
            prompt_ids=prompt,
            completion_ids=rng.integers(0, 151_936, length),
            completion_logprobs=-rng.exponential(1, length).astype(np.float32),
            temperatures=1.0,
            advantages=rng.normal(),
            rewards=float(i % 2),
        )
        for i, length in enumerate([80, 5, 130, 44])
    ]


def branching_turns() -> list[ps.Sample]:
    """A rollout of five turns in which every turn became its own sample."""
    rng = np.random.default_rng(2)
    made: list[ps.Sample] = []
    context = rng.integers(0, 32_000, 50)
    for turn in range(5):
        answer = rng.integers(0, 32_000, 20 + turn)
        logprobs = -rng.exponential(1, len(answer)).astype(np.float32)
        made.append(
            ps.Sample.from_prompt(
                id=f"r/{turn}", prompt_ids=context, completion_ids=answer, completion_logprobs=logprobs
            )
        )
        context = np.concatenate([made[-1].token_ids, rng.integers(0, 32_000, 12)])
    return made


def routed_experts() -> list[ps.Sample]:
    """Experts of a small mixture: the same on a shared prompt, none for one sample, and one all of zeros."""
    rng = np.random.default_rng(3)
    prompt, on_prompt = rng.integers(0, 1000, 40), rng.integers(0, 128, (40, 3, 2))
    made = [ps.Sample(id="without", token_ids=rng.integers(0, 1000, 9))]
    for i in range(3):
        ids = np.concatenate([prompt, rng.integers(0, 1000, 10 + i)])
        experts = np.concatenate([on_prompt, rng.integers(0, 128, (10 + i, 3, 2))])
        made.append(ps.Sample(id=f"{i}", token_ids=ids, routed_experts=experts))
    return [*made, ps.Sample(id="zeros", token_ids=[1, 2], routed_experts=np.zeros((2, 3, 2), np.uint8))]


def routed_experts_everywhere() -> list[ps.Sample]:
    """Sixteen-bit experts for all samples, which share their prompt's."""
    rng = np.random.default_rng(4)
    ids, experts = rng.integers(0, 1000, 64), rng.integers(0, 384, (64, 2, 2))
    return [
        ps.Sample(id=f"{i}", token_ids=ids[: 40 + i], routed_experts=experts[: 40 + i].astype(np.uint16))
        for i in (0, 12, 24)
    ]


def images() -> list[ps.Sample]:
    """Two images in one sample, one in the next, none in the last."""

    def span(seed: str, offset: int, high: int, wide: int) -> ImageSpan:
        name = hashlib.sha256(seed.encode()).hexdigest()
        return ImageSpan(
            hash=name,
            grid=(1, 2 * high, 2 * wide),
            offset=offset,
            length=high * wide,
            media_type="image/png",
            width=28 * wide,
            height=28 * high,
            num_bytes=1234,
        )

    def sample(name: str, count: int, *spans: ImageSpan) -> ps.Sample:
        types = np.zeros(count, np.uint8)
        for one in spans:
            types[one.offset : one.end] = 1
        return ps.Sample(id=name, token_ids=np.arange(count), mm_token_type_ids=types, images=spans)

    cat = span("cat", 3, 2, 3)
    return [sample("two", 40, cat, span("dog", 12, 4, 4)), sample("one", 12, cat), sample("none", 5)]


def every_column() -> list[ps.Sample]:
    """Every column, each absent here, given once there and per token elsewhere; unlikely floats and text."""
    strange = np.array([0x7FC0BEEF, 0x7F800001, 0x80000000, 0, 0xFFFFFFFF, 0x3F800000], np.uint32).view(np.float32)
    ramp = np.linspace(-1, 1, 6)
    return [
        ps.Sample(id="once", token_ids=[1, 2, 3], rewards=np.nan, advantages=-0.0, temperatures=0.7, mode="opd"),
        ps.Sample(id="absent", token_ids=[2**32 - 1, 0], group="數學 🙂", env="é", mode="sft"),
        ps.Sample(
            id="per token",
            policy_version=2**53,
            token_ids=[7, 7, 7, 7, 7, 2**18],
            loss_mask=[0, 0, 0, 0, 0, 1],
            logprobs=np.append(strange[:5], np.float32(-0.5)),
            teacher_logprobs=np.full(6, -2.0),
            rewards=strange,
            temperatures=np.linspace(0.5, 1, 6),
            weight_versions=[0, 0, 1, -1, 2**31 - 1, 5],
            advantages=ramp,
            rl_weights=ramp,
            ce_weights=ramp,
            ref_kl_weights=ramp,
        ),
        ps.Sample(id="one token", token_ids=[5], rewards=[1.0], logprobs=[0.0], weight_versions=[4]),
    ]


def prompts_and_unknown_versions() -> list[ps.Sample]:
    """Two groups of one prompt; of some samples nobody said which version sampled them."""
    made = []
    for i, version in enumerate([7, None, None, 0]):
        group = f"17#{i // 2}"
        columns: dict[str, Any] = {"loss_mask": [0, 0, 1], "rewards": float(i)}
        made.append(
            ps.Sample(
                id=f"{group}/{i % 2}", group=group, prompt="17", policy_version=version, token_ids=[1, 2, i], **columns
            )
        )
    return [*made, ps.Sample(id="alone", token_ids=[9])]


def rollouts() -> list[ps.Sample]:
    """What is known of three rollouts: all there can be, little, nothing."""
    known = {
        "metrics": {"format": 0.5, "broken": None},
        "info": {"task": "17", "note": "naïve"},
        "stop_condition": "max_turns",
        "truncated": True,
        "error": "timeout",
        "agent": "solver",
        "seconds": 3.25,
        "roles": {"names": ["user", "assistant"], "runs": [0, 2, 1, 1]},
    }
    texts: list[Any] = [known, {"seconds": 1.0}, ""]
    return [ps.Sample(id=f"{i}", token_ids=[1, 2, i], rollout=text) for i, text in enumerate(texts)]


def sampling_masks() -> list[ps.Sample]:
    """Kept sets of answers to one prompt; one answer has none, one sample has a set of its only token."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 151_936, 40).tolist()
    made = [
        ps.Sample(id="without", token_ids=prompt),
        ps.Sample(id="one", token_ids=[3], sampling_mask=[[3, 2**32 - 1]]),
    ]
    for i, length in enumerate([30, 7]):
        answer = rng.integers(0, 151_936, length).tolist()
        kept = [sorted({one, *rng.integers(0, 151_936, int(rng.integers(12))).tolist()}) for one in answer]
        made.append(
            ps.Sample.from_prompt(
                id=f"{i}", prompt_ids=prompt, completion_ids=answer, sampling_mask=[[]] * len(prompt) + kept
            )
        )
    return made


def kept_sets_everywhere() -> list[ps.Sample]:
    """All samples have kept sets, on trained tokens alone."""
    return sampling_masks()[2:]


def own_columns() -> list[ps.Sample]:
    """Columns that no reader knows, of every shape, in some samples and in others not."""
    rng = np.random.default_rng(6)
    made = [ps.Sample(id="without", token_ids=[1, 2, 3])]
    for i, length in enumerate([1, 6, 70]):
        own = {column: values_of(rng, column, length) for column in OWN_COLUMNS[i % 2 :: 1 + i % 2]}
        made.append(ps.Sample(id=f"{i}", token_ids=rng.integers(0, 900, length), columns=own))
    return made


def own_columns_everywhere() -> list[ps.Sample]:
    """All samples have all of them; two begin alike."""
    rng = np.random.default_rng(7)
    prompt = rng.integers(0, 900, 40)
    made = []
    for i in range(2):
        ids = np.concatenate([prompt, rng.integers(0, 900, 5 + i)])
        own = {column: values_of(rng, column, len(ids)) for column in OWN_COLUMNS}
        made.append(ps.Sample(id=f"{i}", token_ids=ids, loss_mask=np.arange(len(ids)) > 40, columns=own))
    return made


def top_k_of_a_teacher() -> list[ps.Sample]:
    """Ids and log-probabilities on trained tokens, and of a second teacher on all of them."""
    rng = np.random.default_rng(8)
    ids, logprobs = teacher_topk("other")
    made = []
    for i, length in enumerate([9, 30]):
        mask = np.arange(length) > 4
        rows: dict[str, Any] = {"teacher_topk_ids": rng.integers(0, 151_936, (length, 5)) * mask[:, None]}
        rows["teacher_topk_logprobs"] = -rng.exponential(1, (length, 5)) * mask[:, None]
        other = {ids: rng.integers(0, 151_936, (length, 2)), logprobs: -rng.exponential(1, (length, 2))}
        made.append(ps.Sample(id=f"{i}", token_ids=range(length), loss_mask=mask, columns=other, **rows))
    return made


def sampling_masks_with_items() -> list[ps.Sample]:
    """As `sampling_masks`, from writers that say how many list items each sample has."""
    return sampling_masks()


def kept_sets_everywhere_with_items() -> list[ps.Sample]:
    return kept_sets_everywhere()


def own_columns_with_items() -> list[ps.Sample]:
    return own_columns()


def own_columns_everywhere_with_items() -> list[ps.Sample]:
    return own_columns_everywhere()


def one_token() -> list[ps.Sample]:
    return [ps.Sample(id="a", token_ids=[0])]


def empty() -> list[ps.Sample]:
    return []


BATCHES = (
    plain_group,
    branching_turns,
    routed_experts,
    routed_experts_everywhere,
    images,
    every_column,
    prompts_and_unknown_versions,
    rollouts,
    sampling_masks,
    kept_sets_everywhere,
    own_columns,
    own_columns_everywhere,
    top_k_of_a_teacher,
    sampling_masks_with_items,
    kept_sets_everywhere_with_items,
    own_columns_with_items,
    own_columns_everywhere_with_items,
    one_token,
    empty,
)
WITHOUT_ITEMS = ("sampling_masks", "kept_sets_everywhere", "own_columns", "own_columns_everywhere")
"""Batches whose golden frames were written before frames had list items per sample: they decode, but a writer of today
gives other bytes."""
PROFILES: tuple[Profile, ...] = ("fast", "small")


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    record_file = FOLDER / DIGESTS
    digests: dict[str, str] = json.loads(record_file.read_text()) if record_file.exists() else {}
    for batch in BATCHES:
        for profile in PROFILES:
            path = FOLDER / f"{batch.__name__}_{profile}.frame"
            if path.exists():
                print(f"kept   {path.name}")
                continue
            samples = batch()
            path.write_bytes(ps.encode(samples, profile))
            digests[path.name] = digest(samples)
            print(f"wrote  {path.name}: {path.stat().st_size} bytes")
    record_file.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
