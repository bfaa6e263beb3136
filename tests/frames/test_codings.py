"""Every column takes the cheapest coding for its content, and the profile decides what is on offer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import penstock as ps
from benchmarks import data
from penstock.arrays.run_lengths import MaskRuns, bit_view
from penstock.commands.inspect import inspect_frame
from penstock.errors import ConfigError
from penstock.frames import codings
from penstock.frames.codings import FEW, Profile, Reader, Writer
from penstock.frames.layout import ALIGN

LONG = 5000


def coding_of(column: str, values: NDArray[Any], profile: Profile = "fast") -> str:
    """The coding that a frame gives to a column of one sample."""
    mask = np.arange(len(values)) >= len(values) // 2
    columns: dict[str, Any] = {"token_ids": np.arange(len(values)), "loss_mask": mask, column: values}
    report = inspect_frame(ps.encode([ps.Sample(policy_version=0, **columns)], profile))
    return next(str(entry["coding"]) for entry in report["columns"] if entry["name"] == column)


rng = np.random.default_rng(5)
noise = -rng.random(LONG).astype(np.float32)
steps = np.repeat(np.array([1, 2], np.float32), LONG // 2)
noise_where_trained = np.where(np.arange(LONG) >= LONG // 2, noise, np.float32(0))


@pytest.mark.parametrize(
    ("column", "values", "fast", "small"),
    [
        ("token_ids", rng.integers(0, 151_936, LONG), "narrow 18 bit", "packed 18 bit"),
        ("token_ids", rng.integers(0, 2**32, LONG), "narrow 32 bit", "packed 32 bit"),
        ("token_ids", np.full(LONG, 7), "constant", "constant"),
        ("loss_mask", np.arange(LONG) >= 100, "runs (narrow 16 bit)", "runs (narrow 16 bit)"),
        ("loss_mask", (np.arange(LONG) % 2).astype(np.bool_), "narrow 1 bit", "packed 1 bit"),
        ("logprobs", noise_where_trained, "sparse (raw)", "sparse (planes)"),
        ("logprobs", noise, "raw", "planes"),
        ("advantages", steps - 1, "sparse (constant)", "sparse (constant)"),
        ("rewards", steps, "runs (narrow 12 bit)", "runs (narrow 12 bit)"),
        ("routed_experts", rng.integers(0, 128, (LONG, 2, 4)), "raw", "planes"),
        ("routed_experts", np.zeros((LONG, 2, 4), np.uint8), "constant", "constant"),
        ("weight_versions", rng.integers(-1, 9, LONG), "raw", "planes"),
    ],
)
def test_content_decides_the_coding(column: str, values: NDArray[Any], fast: str, small: str) -> None:
    assert coding_of(column, values, "fast") == fast
    assert coding_of(column, values, "small") == small


DTYPES = ["|b1", "|u1", "<u2", "<u4", "<i4", "<i8", "<f4"]


@pytest.mark.parametrize("profile", ["fast", "small"])
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_any_array_comes_back_to_the_bit(profile: Profile, dtype: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.integers(1, 90)), max_size=5))
    bits = b"".join(raw[: np.dtype(dtype).itemsize] * count for raw, count in parts)
    raw = np.frombuffer(bits, dtype) if dtype != "|b1" else np.frombuffer(bits, np.uint8) > 127
    mask = np.arange(len(raw)) % data.draw(st.integers(1, 4)) == 0
    values = np.where(mask, raw, np.zeros(1, dtype)) if data.draw(st.booleans()) else raw
    trained = MaskRuns.of(mask)
    writer = Writer(profile, align=True)
    block = writer.write(values, trained)
    section = memoryview(b"".join(bytes(piece) for piece in writer.pieces))
    reader = Reader(section, align=True)
    back = reader.read(block, np.dtype(dtype), len(values), "test", trained)
    reader.finish("test")
    assert back.dtype == values.dtype
    assert bit_view(back).tolist() == bit_view(values).tolist()


@pytest.mark.parametrize("profile", ["fast", "small"])
def test_realistic_batches_come_back_and_small_is_smaller(profile: Profile) -> None:
    generator = np.random.default_rng(11)
    turns = data.turns_as_samples(generator, rollouts=2, turns=5)
    group = [data.sample(generator, data.text(generator, 3000), n, f"g/{n}") for n in (1, 100, 6000)]
    for samples in (turns, group, data.long_sample(generator)):
        frame = ps.encode(samples, profile)
        assert list(ps.decode(frame)) == samples
        assert len(ps.encode(samples, "small")) < len(ps.encode(samples, "fast"))


def test_body_buffers_are_aligned_so_that_raw_columns_are_views() -> None:
    generator = np.random.default_rng(0)
    samples = [ps.Sample(id=f"{n}", token_ids=range(n), rl_weights=generator.random(n)) for n in (5, 7)]
    frame = ps.encode(samples)
    assert len(frame) % ALIGN == 0
    values = ps.decode(frame)["rl_weights"].values
    assert np.shares_memory(values, np.frombuffer(frame, np.uint8))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda frame: np.frombuffer(frame, np.uint8)])
def test_any_buffer_can_be_decoded(kind: Any) -> None:
    sample = ps.Sample(id="a", token_ids=[1, 2, 3])
    assert list(ps.decode(kind(ps.encode([sample])))) == [sample]


@pytest.mark.parametrize("profile", ["tiny", "", None])
def test_an_unknown_profile_is_refused_with_those_there_are(profile: Any) -> None:
    with pytest.raises(ConfigError, match="must be one of fast, small"):
        ps.encode([], profile)


PROGRAM = """
import hashlib, sys
from scripts.make_golden import BATCHES, PROFILES
import penstock as ps
whole = hashlib.sha256()
for batch in BATCHES:
    for profile in PROFILES:
        whole.update(ps.encode(batch(), profile))
print(whole.hexdigest())
"""


@pytest.mark.process
def test_the_same_samples_give_the_same_bytes_in_every_process_and_hash_seed() -> None:
    root = Path(__file__).parent.parent.parent
    seen = set()
    for seed in ("0", "1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM]
        seen.add(subprocess.run(command, cwd=root, env=env, check=True, capture_output=True, text=True).stdout)
    assert len(seen) == 1


@given(
    st.sampled_from(["<u4", "<u2", "<i8", "<u8", "<i4"]).flatmap(
        lambda dtype: st.lists(
            st.one_of(st.integers(0, 3), st.integers(0, 2**15), st.integers(0, 2 ** (8 * int(dtype[2]) - 1) - 1)),
            min_size=1,
            max_size=FEW,
        ).map(lambda values: np.array(values, dtype))
    ),
    st.sampled_from(["fast", "small"]),
)
def test_few_numbers_are_coded_as_many_are(values: Any, profile: Profile) -> None:
    made, plain = Writer(profile, align=True), Writer(profile, align=True)
    block = made.write(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codings, "FEW", 0)
        assert plain.write(values) == block
    assert b"".join(made.pieces) == b"".join(plain.pieces)
