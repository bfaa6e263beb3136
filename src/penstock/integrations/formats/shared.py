"""What the formats share: the file or stream that is read or written, lines of JSON, options, losses, responses.

Prompt and response are the form of most trainers. The response begins at the first trained token. Most trainers store
columns for the response only: writing cuts the prompt's part off, reading puts fill values in front.

    token_ids  p p p r r      their logprobs        x y
    loss_mask  0 0 0 1 1      our logprobs    0 0 0 x y
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from penstock.arrays import COLUMNS, Array, Ragged, Sample, coerce, offsets_of, read_rollout
from penstock.atomic import replacing
from penstock.capture import TURN_COLUMNS, Trajectory, from_arrays
from penstock.errors import CorruptFile, InvalidInput, PenstockError

STANDARD = "-"
MAX_LINE_BYTES = 1 << 30
_HAS_NAN = re.compile(rb"\b(NaN|Infinity)\b")


@dataclass(frozen=True, slots=True)
class Place:
    """A path, or `-` for the standard stream."""

    word: str

    @property
    def is_stream(self) -> bool:
        return self.word == STANDARD

    @property
    def name(self) -> str:
        """The name in error messages."""
        return "standard input" if self.is_stream else self.word

    @property
    def short(self) -> str:
        """A prefix for the ids of records that have none."""
        return "stdin" if self.is_stream else self.path.name

    @property
    def path(self) -> Path:
        """The path. Raises InvalidInput for a stream: formats that seek cannot use one."""
        if self.is_stream:
            raise InvalidInput(f"{self.word}: this format needs a file and cannot use a stream")
        return Path(self.word)

    @property
    def is_zip(self) -> bool:
        """Whether it is a zip file, also if it is a damaged one that Python's check stumbles over."""
        try:
            return zipfile.is_zipfile(self.path)
        except zipfile.BadZipFile:
            return True

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        if self.is_stream:
            yield sys.stdin.buffer
            return
        if self.path.is_dir():
            raise InvalidInput(f"{self.word}: a folder; give a file, or name the folder's format with --from")
        with self.path.open("rb") as file:
            yield file

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """Open a file that appears under its name when it is complete, or standard output."""
        if self.is_stream:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
            return
        if self.path.is_dir():
            raise InvalidInput(f"{self.word}: a folder; name a file to write")
        if not self.path.parent.is_dir():
            raise InvalidInput(f"{self.word}: folder {self.path.parent} does not exist; create it first")
        with replacing(self.path) as file:
            yield file


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of single formats."""

    advantages: str | None = None
    """The rule that computes advantages from a group's rewards, by name; None leaves advantages unchanged."""
    reward_key: str | None = None
    """For slime: which reward, if samples have several."""
    ranks: int = 1
    """For prime-rl: data ranks of the trainer."""
    seq_len: int | None = None
    """For prime-rl: tokens per micro-batch; default: the longest sample of a step."""
    samples_per_step: int | None = None
    """For prime-rl: samples per step; default: all in one step."""
    first_step: int = 1
    """For prime-rl: number of the first step."""


def json_lines(place: Place, *, nan: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, object) for each line that is not blank. Lines count from 1. `nan` as in `json_object`."""
    number = 0
    with place.reading() as file:
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            where = f"{place.name}:{number}"
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise InvalidInput(f"{where}: longer than {MAX_LINE_BYTES} bytes; one record is one line")
            if line.strip():
                yield where, json_object(line, where, nan=nan)


def json_object(text: bytes, where: str, *, nan: bool = False) -> dict[str, Any]:
    """Parse text that must be one JSON object. `nan` also takes NaN and Infinity, which Python's json writes."""
    try:
        record = json.loads(text) if nan and _HAS_NAN.search(text) else msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: not JSON ({error}); each line must be one object") from None
    if not isinstance(record, dict):
        raise InvalidInput(f"{where}: a {type(record).__name__}; each line must be one object")
    return record


_ODD = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, RuntimeError, SyntaxError),
    *(MemoryError, EOFError, msgspec.MsgspecError, zipfile.BadZipFile, zlib.error),
)


@contextmanager
def unreadable(name: str, kind: str) -> Iterator[None]:
    """Raise CorruptFile for whatever else reading a file raises: readers check what they know of, and files of
    strangers hold the rest."""
    try:
        yield
    except (PenstockError, OSError):
        raise
    except _ODD as error:
        found = f"{type(error).__name__}: {error!s:.300}"
        raise CorruptFile(f"{name}: {found}; not a readable file of format {kind}; write it again") from error


# ------------------------------------------------------------------ losses

_OF_SAMPLE = tuple(name for name, column in COLUMNS.items() if column.per == "sample" and name != "id")


@dataclass(frozen=True, slots=True)
class Lost:
    """The losses of one conversion. Readers and writers add to them.

    >>> lost = Lost()
    >>> lost.fields({"tokens": [1], "label": "4", "metadata": {}}, known=("tokens",))
    >>> lost.columns(Sample(token_ids=[1, 2], rewards=1.0, env="math"), held=("token_ids", "loss_mask"))
    >>> lost.as_dict()
    {'unread': {'label': 1}, 'unwritten': {'env': 1, 'rewards': 1}, 'left_out': {}, 'untrained': {}}
    """

    unread: Counter[str] = field(default_factory=Counter)
    """Input fields that a sample cannot hold: name -> number of records."""
    unwritten: Counter[str] = field(default_factory=Counter)
    """Columns and other fields of samples that the target cannot hold: name -> number of samples."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Samples that the target cannot hold at all: reason -> number."""
    untrained: Counter[str] = field(default_factory=Counter)
    """No loss: samples of a run that are converted although no step takes them. Reason -> number."""

    def __bool__(self) -> bool:
        return bool(self.unread or self.unwritten or self.left_out)

    def fields(self, record: Any, known: Iterable[str]) -> None:
        """Count the fields of a record that were not read. Empty fields are no loss."""
        taken = set(known)
        self.unread.update(name for name, value in record.items() if name not in taken and _is_filled(value))

    def keeps(self, sample: Sample, *, needs: Iterable[str] = ()) -> bool:
        """Check whether a target without images, which needs certain columns, can hold a sample. Counts it if not.

        A sample without its images would be trained as if its placeholders were text.
        """
        reason = "images" if sample.images else next((f"no {name}" for name in needs if name not in sample), None)
        self.left_out.update([reason] if reason else [])
        return reason is None

    def columns(self, sample: Sample, held: Iterable[str]) -> None:
        """Count what the sample has and the target does not hold. Ids are not counted: every reader can make them."""
        taken = set(held)
        others = (name for name in (*_OF_SAMPLE, "images") if name not in taken and _is_given(sample, name))
        self.unwritten.update([*others, *(name for name in sample.columns if name not in taken)])

    def as_dict(self) -> dict[str, dict[str, int]]:
        return {
            "unread": dict(sorted(self.unread.items())),
            "unwritten": dict(sorted(self.unwritten.items())),
            "left_out": dict(sorted(self.left_out.items())),
            "untrained": dict(sorted(self.untrained.items())),
        }


def _is_given(sample: Sample, name: str) -> bool:
    """Check whether a field has another value than its default."""
    value = getattr(sample, name)
    return value not in (None, (), "") and (name, value) != ("mode", COLUMNS["mode"].fill)


def _is_filled(value: Any) -> bool:
    """Check whether a field holds anything."""
    if value is None:
        return False
    return bool(value) if isinstance(value, str | list | tuple | dict) else True


# ------------------------------------------------------------------ prompt and response


def prompt_length(sample: Sample) -> int:
    """Count the tokens before the first trained one; all tokens if none is trained.

    >>> prompt_length(Sample(token_ids=[1, 2, 3, 4], loss_mask=[0, 0, 1, 0]))
    2
    """
    mask = sample.loss_mask
    return int(mask.argmax()) if mask.any() else sample.num_tokens


def behind_prompt(name: str, values: Any, start: int, count: int, where: str) -> Array:
    """Extend values of the response, which begins at `start`, to a column of `count` tokens."""
    tail = coerce(COLUMNS[name], values, where)
    if len(tail) != count - start:
        raise InvalidInput(f"{where}: {len(tail)} values for a response of {count - start} tokens; give one each")
    return np.concatenate([np.full(start, COLUMNS[name].fill, tail.dtype), tail])


def lists_behind_prompt(lists: Ragged, start: int, count: int, where: str) -> Ragged:
    """Extend lists of the response, which begins at `start`, to one list per token."""
    if len(lists) != count - start:
        raise InvalidInput(f"{where}: {len(lists)} lists for a response of {count - start} tokens; give one each")
    return Ragged(lists.values, offsets_of([*[0] * start, *lists.lengths.tolist()]))


def per_token(sample: Sample, name: str) -> Array | None:
    """[T] Return a column per token, also if it was given once per sample. None if the sample lacks it."""
    cells = sample.get(name)
    return None if cells is None else np.broadcast_to(cells, sample.num_tokens) if cells.ndim == 0 else cells


def one_number(sample: Sample, name: str) -> float | None:
    """Return the number that a column has on all trained tokens; None if it is absent or has several."""
    cells = sample.get(name)
    if cells is None or cells.ndim == 0:
        return None if cells is None else float(cells)
    found: Array = cells[sample.loss_mask] if sample.loss_tokens else cells
    return float(found[0]) if bool((found == found[0]).all()) else None


def once(values: Array, mask: Array) -> Array:
    """Return one number for a column with one value on all trained tokens, and that or 0 on the others."""
    trained = values[mask] if mask.any() else values
    one = trained[:1].reshape(())
    return one if bool((trained == one).all() and ((values == one) | (values == 0))[~mask].all()) else values


def to_trajectory(sample: Sample, **fields: Any) -> Trajectory:
    """Convert a sample back into a trajectory; trained tokens count as sampled. `fields` are those of `Trajectory`.

    Use it to score rewards or compute advantages again with `penstock.convert.make_group`. So it has no advantages.

    >>> sample = Sample(token_ids=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -0.5, -0.25], rewards=1.0, env="math")
    >>> to_trajectory(sample)
    Trajectory(2 turns, 3 tokens, 2 sampled, reward=1.0, id='', env='math')
    """
    columns = {name: cells for name, cells in sample.columns.items() if name in TURN_COLUMNS and name != "advantages"}
    reward = one_number(sample, "rewards")
    facts: dict[str, Any] = {"env": sample.env, "run": sample.run, "mode": sample.mode}
    facts |= {"policy_version": sample.policy_version, "reward": None if reward != reward else reward}
    known = read_rollout(sample.rollout)
    facts |= {name: getattr(known, name) for name in ("metrics", "info", "stop_condition", "truncated", "seconds")}
    facts |= {"agent": known.agent, "error": known.error or None}
    logprobs = sample.get("logprobs") if sample.loss_tokens else None
    return from_arrays(
        sample.token_ids,
        sample.loss_mask,
        logprobs=logprobs,
        columns=columns,
        images=sample.images,
        **{**facts, **fields},
    )
