"""Write and read prime-rl's micro-batch files, `step_N/rank_R.bin`, for its stock trainer.

    outputs/rollouts/step_1/rank_0.bin     msgpack: a list of micro-batches, each an array by position

prime-rl trainers with `rollout_transport = "filesystem"` wait for these files. Since late August 2026 the folder
`rollouts` is called `batches`: give the trainer's output folder, and the one in it is used. The layout is that of
September 2026. Fields were only ever appended and readers ignore unknown trailing ones, so earlier trainers read the
same files.

The trainer treats a file differently from Penstock in two respects, and the writer handles both. Padding is part of the
last sequence. Weights of the cross-entropy and reference terms count wherever they are not zero, regardless of the loss
mask, so they are written as zero where the mask is zero.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.arrays import ALL_OR_NONE, WEIGHTS, Array, ImageSpan, Ragged, Sample, offsets_of
from penstock.atomic import replacing
from penstock.capture import located
from penstock.errors import CorruptFile, InvalidInput
from penstock.integrations.formats.shared import Lost, Options, Place, once
from penstock.packing import MicroBatch, StepOfRank, pack

MAX_FILE_BYTES = 4 << 30
HELD = (
    *("token_ids", "loss_mask", "logprobs", "temperatures", "advantages", "teacher_logprobs", *WEIGHTS),
    *("routed_experts", "mm_token_type_ids", "sampling_mask", "env", "mode", "images"),
)
"""What a file can hold: modes as weights, images if the writer has a function for them."""
_DTYPES = ("uint8", "uint16", "int16", "int32")
_FILE = re.compile(r"rank_(\d{1,9})\.bin")
_STEP = re.compile(r"step_(\d{1,18})")

Images = Callable[[MicroBatch], object]
"""Encodes the images of a micro-batch: see `encoded_tensors` and `image_refs`."""


class PrimeBatch(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """A micro-batch in prime-rl's format. Lists have one value per token, unless noted."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    """Log-probability of this token by the sampler; 0.0 if it was not sampled."""
    position_ids: list[int]
    sequence_lengths: list[int]
    """One per sequence."""
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    """One per sequence; attention does not cross them."""
    ref_logprobs: list[float] | None = None
    routed_experts: tuple[bytes, list[int], str] | None = None
    """Bytes, [tokens, layers, top_k], dtype."""
    multimodal: Any = None
    """Tensors by name until August 2026, references to images since."""
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    sampling_mask: list[bytes | None] | None = None
    """Two buffers of int32: the kept ids, concatenated, and their number per token."""
    trace_ids: list[str] | None = None
    """One per sequence."""
    branch_indices: list[int] | None = None
    """One per sequence."""


class PrimeRlWriter:
    """Writes one rank's steps as files for a stock prime-rl trainer.

    >>> import tempfile, penstock as ps
    >>> sample = ps.Sample(token_ids=[5, 6], loss_mask=[0, 1], logprobs=[0, -0.5], advantages=1.0)
    >>> step = ps.pack([sample], ranks=1, seq_len=8)
    >>> path = PrimeRlWriter(tempfile.mkdtemp(), rank=0).write(step.ranks[0], number=1)
    >>> path.parent.name, path.name, read_batches(path)[0].inference_logprobs
    ('step_1', 'rank_0.bin', [0.0, -0.5])
    """

    def __init__(self, folder: str | Path, *, rank: int, images: Images | None = None) -> None:
        """`folder` is the trainer's output folder, or `rollouts` (`batches`) in it; `images` encodes images."""
        self._folder, self._rank, self._images = steps_folder(Path(folder)), rank, images

    def write(self, step: StepOfRank | Iterable[MicroBatch], *, number: int | None = None) -> Path:
        """Write a step of `plane.source` or `pack`. It is on disk when this returns. Steps count from 1."""
        at = getattr(step, "number", None) if number is None else number
        if at is None:
            raise InvalidInput("number: missing, and the step has none; give the step's number, from 1 up")
        batches = [to_prime_rl(batch, images=self._images) for batch in step]
        path = self._folder / f"step_{at}" / f"rank_{self._rank}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.msgpack.encode(batches))
        return path


def encoded_tensors(tensors: Mapping[str, Array]) -> dict[str, list[Any]]:
    """Encode model inputs by name (pixel_values, image_grid_thw, ...), for trainers until August 2026."""
    return {
        name: [array.dtype.name, list(array.shape), np.ascontiguousarray(array).tobytes()]
        for name, array in tensors.items()
    }


def image_refs(spans: Iterable[ImageSpan], url: Callable[[ImageSpan], str]) -> list[list[list[Any]]]:
    """Encode references to images, for later trainers: the URL of each, and its tokens."""
    return [[[url(span), span.offset, span.length] for span in spans]]


# ------------------------------------------------------------------ writing


def to_prime_rl(batch: MicroBatch, *, images: Images | None = None) -> PrimeBatch:
    """Convert a micro-batch to prime-rl's format."""
    if batch.images and images is None:
        raise InvalidInput(
            f"micro-batch of {batch.segments.ids[:1]}: {len(batch.images)} images; "
            "pass images=, a function that encodes them"
        )
    mask: Array = batch["loss_mask"]
    lengths = _lengths(batch)
    weights = {name: _weights(batch, name, mask) for name in WEIGHTS}
    return PrimeBatch(
        input_ids=batch["token_ids"].tolist(),
        loss_mask=mask.tolist(),
        advantages=_needed(batch, "advantages", mask, weights["rl_weights"]),
        inference_logprobs=_needed(batch, "logprobs", mask, weights["rl_weights"], weights["ref_kl_weights"]),
        position_ids=batch["position_ids"].tolist(),
        sequence_lengths=lengths,
        temperatures=batch["temperatures"].tolist() if "temperatures" in batch else [1.0] * batch.num_tokens,
        env_names=_envs(batch),
        seq_lens=lengths,
        ref_logprobs=_without_nan(batch["teacher_logprobs"]) if "teacher_logprobs" in batch else None,
        routed_experts=_routed(batch),
        multimodal=images(batch) if batch.images and images is not None else None,
        mm_token_type_ids=batch["mm_token_type_ids"].tolist() if "mm_token_type_ids" in batch else None,
        sampling_mask=_sampling_mask(batch),
        trace_ids=list(batch.segments.ids) or [""] * len(lengths),
        branch_indices=[0 if batch.segments.ids else -1] * len(lengths),
        **{name: None if values is None else values.tolist() for name, values in weights.items()},
    )


def _lengths(batch: MicroBatch) -> list[int]:
    """Return the tokens of each sequence. The last one includes the padding: 5 7 with padding 4 is 5 11."""
    lengths: list[int] = batch.sequence_lengths.tolist()
    if batch.segments.ids and len(lengths) > batch.sample_count:
        lengths[-2:] = [sum(lengths[-2:])]
    return lengths


def _weights(batch: MicroBatch, name: str, mask: Array) -> Array | None:
    if name not in batch:
        return None
    values: Array = batch[name]
    return values if name == "rl_weights" else np.where(mask, values, np.float32(0))


def _needed(batch: MicroBatch, name: str, mask: Array, *weights: Array | None) -> list[float]:
    """Return a column that the loss terms with these weights need; zeros if none of them trains a token."""
    if name in batch:
        return _without_nan(batch[name])
    own = [values for values in weights if values is not None]
    trained = mask & np.logical_or.reduce([values != 0 for values in own]) if own else mask
    if trained.any():
        token = int(trained.argmax())
        raise InvalidInput(
            f"sample {batch.sample_at(token)!r}.{name}: missing; prime-rl cannot train without them, record them"
        )
    return [0.0] * batch.num_tokens


def _without_nan(values: Array) -> list[float]:
    """Replace NaN, on tokens that are not trained, by 0.0: the trainer computes with every value."""
    filled: list[float] = np.nan_to_num(values, nan=0.0).tolist()
    return filled


def _envs(batch: MicroBatch) -> list[str]:
    names: list[str] = []
    for env, length in zip(batch.segments.envs, batch.segments.lengths.tolist(), strict=True):
        if env == "all":
            raise InvalidInput("env: 'all', which prime-rl reserves for totals; rename the environment")
        names += [env] * length
    return names + [""] * (batch.num_tokens - len(names))


def _routed(batch: MicroBatch) -> tuple[bytes, list[int], str] | None:
    if "routed_experts" not in batch:
        return None
    experts: Array = np.ascontiguousarray(batch["routed_experts"])
    return experts.tobytes(), list(experts.shape), experts.dtype.name


def _sampling_mask(batch: MicroBatch) -> list[bytes | None] | None:
    if "sampling_mask" not in batch:
        return None
    kept: Ragged = batch["sampling_mask"]
    if len(kept.values) and int(kept.values.max()) >= 2**31:
        raise InvalidInput(f"sampling_mask: id {int(kept.values.max())}; prime-rl's ids are below 2**31")
    return [kept.values.astype("<i4").tobytes(), kept.lengths.astype("<i4").tobytes()]


# ------------------------------------------------------------------ reading


def read_batches(path: Path) -> list[PrimeBatch]:
    """Read the micro-batches of one file."""
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise CorruptFile(f"{path}: {size} bytes; the limit is {MAX_FILE_BYTES}")
    try:
        with path.open("rb") as file:
            if not size:
                raise CorruptFile(f"{path}: empty; not a micro-batch file of prime-rl")
            # Mapped, because a sparse file of gigabytes costs nothing to make, and most fail at the first byte.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return msgspec.msgpack.decode(data, type=list[PrimeBatch])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(f"{path}: {error}; not a micro-batch file of prime-rl") from None


def steps_folder(folder: Path) -> Path:
    """Return the folder of steps in a trainer's output folder: `batches`, or `rollouts` before late August 2026.

    A folder that has neither is taken for the folder of steps itself.
    """
    found = [path for path in (folder / "batches", folder / "rollouts") if path.is_dir()]
    if len(found) > 1:
        raise InvalidInput(f"{folder}: has batches and rollouts; give the one that the trainer reads")
    return found[0] if found else folder


def files_in(path: Path) -> list[Path]:
    """List the files of a folder of steps or of one step, by step and rank. A file is its own list."""
    if not path.is_dir():
        return [path]
    path = steps_folder(path)
    files = [file for file in (*path.glob("rank_*.bin"), *path.glob("step_*/rank_*.bin")) if _FILE.fullmatch(file.name)]
    return sorted(files, key=lambda file: (_number(_STEP, file.parent.name), _number(_FILE, file.name)))


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else -1


def read_prime_rl(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of a file, or of all files in a folder, without padding and dummies."""
    files = files_in(place.path)
    if not files:
        raise InvalidInput(
            f"{place.name}: no run and no step_N/rank_R.bin in it; give a run's folder, or prime-rl's output folder"
        )
    for file in files:
        for m, batch in enumerate(read_batches(file)):
            where = f"{file} micro-batch {m}"
            if batch.multimodal is not None:
                lost.unread["images"] += 1
            yield from samples_of(batch, where=where, name=f"{file.parent.name}/{file.stem}/{m}")


def samples_of(batch: PrimeBatch, *, where: str, name: str) -> Iterator[Sample]:
    """Yield the samples of a micro-batch. Ids are their trace ids, or `name` and a number."""
    arrays = _arrays(batch, where)
    odd = next((length for length in batch.sequence_lengths if not 1 <= length <= len(batch.input_ids)), None)
    if odd is not None:
        raise CorruptFile(f"{where}: a sequence of {odd} tokens for {len(batch.input_ids)} ids; each has at least one")
    edges = offsets_of(batch.sequence_lengths).tolist()
    if edges[-1] != len(batch.input_ids):
        raise CorruptFile(f"{where}: sequences of {edges[-1]} tokens for {len(batch.input_ids)} ids")
    for i, (a, b) in enumerate(pairwise(edges)):
        positions = arrays["position_ids"][a:b]
        begins = np.flatnonzero(positions[1:] == 0)
        end = a + int(begins[0]) + 1 if len(begins) else b  # positions 0 1 2 0 1: padding starts at the second 0
        trace = batch.trace_ids[i] if batch.trace_ids and i < len(batch.trace_ids) else ""
        if not trace and not batch.env_names[a] and not any(batch.loss_mask[a:b]):
            continue  # padding, or a dummy
        with located(f"{where} sequence {i}"):
            yield _sample(arrays, slice(a, end), env=batch.env_names[a], id=trace or f"{name}/{i}")


def _arrays(batch: PrimeBatch, where: str) -> dict[str, Any]:
    """Return the columns of a micro-batch under Penstock's names, all of one length."""
    try:
        given = _columns(batch, where)
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptFile(f"{where}: {error!s:.200}; not written by prime-rl, or truncated") from None
    for column, values in given.items():
        if len(values) != len(batch.input_ids):
            raise CorruptFile(f"{where}.{column}: {len(values)} values for {len(batch.input_ids)} tokens")
    return given


def _columns(batch: PrimeBatch, where: str) -> dict[str, Any]:
    given: dict[str, Any] = {
        "token_ids": np.array(batch.input_ids, np.int64),
        "loss_mask": np.array(batch.loss_mask, np.bool_),
        "logprobs": np.array(batch.inference_logprobs, np.float32),
        "advantages": np.array(batch.advantages, np.float32),
        "temperatures": np.array(batch.temperatures, np.float32),
        "position_ids": np.array(batch.position_ids, np.int64),
        "env_names": batch.env_names,
    }
    others = {"teacher_logprobs": batch.ref_logprobs, **{name: getattr(batch, name) for name in WEIGHTS}}
    given |= {name: np.array(values, np.float32) for name, values in others.items() if values is not None}
    if batch.mm_token_type_ids is not None and not any(batch.mm_token_type_ids):
        given["mm_token_type_ids"] = np.array(batch.mm_token_type_ids, np.uint8)
    if batch.routed_experts is not None:
        data, shape, dtype = batch.routed_experts
        if dtype not in _DTYPES:
            raise CorruptFile(f"{where}.routed_experts: dtype {dtype[:40]!r}; must be one of {', '.join(_DTYPES)}")
        given["routed_experts"] = np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    if batch.sampling_mask is not None:
        ids, counts = (np.frombuffer(data or b"", "<i4") for data in batch.sampling_mask[:2])
        given["sampling_mask"] = Ragged(ids.astype(np.uint32), offsets_of(counts))
        if int(counts.sum()) != len(ids):
            raise CorruptFile(f"{where}.sampling_mask: {len(ids)} ids for counts of {int(counts.sum())}")
    return given


def _sample(arrays: dict[str, Any], cut: slice, *, env: str, id: str) -> Sample:  # noqa: A002 - the field's own name
    own = {name: values[cut] for name, values in arrays.items() if name not in ("position_ids", "env_names")}
    mask = own["loss_mask"]
    for name in ("advantages", "temperatures"):
        own[name] = once(own[name], mask)
    if own["temperatures"].ndim:
        own["temperatures"] = np.where(own["temperatures"] > 0, own["temperatures"], np.float32(1))  # context has none
    return Sample(id=id, env=env, **own)


# ------------------------------------------------------------------ files of samples


def write_prime_rl(samples: Iterable[Sample], place: Place, lost: Lost, options: Options) -> None:
    """Write steps of packed micro-batches into the folder that the trainer polls."""
    rows = (sample for sample in samples if lost.keeps(sample, needs=_columns_to_train(sample)) and _fits(sample, lost))
    number = options.first_step
    while batch := list(islice(rows, options.samples_per_step)):
        held = [_for_prime_rl(sample, lost) for sample in batch]
        longest = max(sample.num_tokens for sample in held)
        step = pack(held, ranks=options.ranks, seq_len=options.seq_len or longest)
        for rank in step.ranks:
            if (steps_folder(place.path) / f"step_{number}" / f"rank_{rank.rank}.bin").exists():
                raise InvalidInput(f"{place.name}/step_{number}: already exists; pass --first-step, or another folder")
            PrimeRlWriter(place.path, rank=rank.rank).write(rank, number=number)
        number += 1


def _columns_to_train(sample: Sample) -> list[str]:
    """Return the columns a sample needs for training: by its mode, and by its own weights."""
    modes = {sample.mode}
    for name, mode in zip(WEIGHTS, ("rl", "sft", "opd"), strict=True):
        modes |= {mode} if name in sample and sample[name][sample.loss_mask].any() else set()
    needs = [name for name, of in ALL_OR_NONE.items() if modes & set(of) and name in HELD]
    return needs if sample.loss_tokens else []


def _fits(sample: Sample, lost: Lost) -> bool:
    kept = sample.get("sampling_mask")
    beyond = kept is not None and len(kept.values) and int(kept.values.max()) >= 2**31
    lost.left_out.update(["sampling masks with ids from 2**31 on"] if beyond else [])
    return not beyond


def _for_prime_rl(sample: Sample, lost: Lost) -> Sample:
    lost.columns(sample, held=HELD)
    dropped = [name for name in sample.columns if name not in HELD]
    known = {name: None for name in dropped if name not in sample.own}
    return sample.replace(**known, columns=dict.fromkeys(sample.own)) if dropped else sample
