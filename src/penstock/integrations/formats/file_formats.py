"""The file formats of `penstock convert`, how they are detected, and the conversion between any two.

Formats read and write samples one at a time. What the other side cannot hold is counted by name. A format is detected
by the file's ending, or by its first bytes if several share an ending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, BinaryIO

from penstock.arrays import Own, Sample
from penstock.convert import Rollouts, advantage_named
from penstock.errors import InvalidInput
from penstock.frames import MAGIC, by_group
from penstock.integrations.formats.penstock_files import (
    read_export,
    read_frame_file,
    read_run_groups,
    write_frame_file,
)
from penstock.integrations.formats.prime_rl_batches import read_prime_rl, write_prime_rl
from penstock.integrations.formats.sample_files import (
    ROWS,
    columns_of,
    own_columns_of,
    read_lines,
    read_table,
    write_lines,
    write_table,
)
from penstock.integrations.formats.shared import Lost, Options, Place, one_number, unreadable
from penstock.integrations.formats.slime_samples import read_slime, write_slime
from penstock.integrations.formats.trajectory_files import ATIF_MARK, read_agent_lightning, read_atif, read_traces
from penstock.integrations.formats.verl_tensors import read_verl, write_verl
from penstock.integrations.trainers.trl_rollouts import read_trl, write_trl
from penstock.log import plane_of

_LOOK = 1 << 20
Read = Callable[[Place, Lost, Options], Iterator[Sample]]
Write = Callable[[Iterable[Sample], Place, Lost, Options, Own], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    name: str
    summary: str
    endings: tuple[str, ...] = ()
    """Longer ones are tried first."""
    keys: tuple[str, ...] = ()
    """Fields of the first JSON line, to tell formats apart that share an ending."""
    mark: bytes = b""
    """Bytes among the first 4 KiB, for formats whose records may span several lines."""
    is_folder: bool = False
    """Whether the format is a folder, which has no ending."""
    read: Read | None = None
    write: Write | None = None


@dataclass(slots=True)
class Conversion:
    """Counts of a conversion, and what it lost."""

    inputs: tuple[str, ...]
    sources: tuple[str, ...]
    """The format of each input."""
    output: str
    target: str
    samples: int = 0
    groups: int = 0
    """Number of consecutive runs of samples with the same group."""
    tokens: int = 0
    loss_tokens: int = 0
    lost: Lost = field(default_factory=Lost)

    @property
    def written(self) -> int:
        """Number of samples that the target could hold."""
        return self.samples - sum(self.lost.left_out.values())

    def counted(self, samples: Iterable[Sample], tell: Callable[[Conversion], None]) -> Iterator[Sample]:
        group: str | None = None
        for sample in samples:
            self.samples += 1
            self.tokens += sample.num_tokens
            self.loss_tokens += sample.loss_tokens
            self.groups += not sample.group or sample.group != group
            group = sample.group
            tell(self)
            yield sample

    def as_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("samples", "groups", "tokens", "loss_tokens", "written")}
        inputs = [{"file": name, "format": kind} for name, kind in zip(self.inputs, self.sources, strict=True)]
        output = {"file": self.output, "format": self.target}
        return {"inputs": inputs, "output": output, **counts, **self.lost.as_dict()}


def convert_files(
    inputs: Sequence[str],
    output: str,
    *,
    source: str | None = None,
    target: str | None = None,
    options: Options | None = None,
    tell: Callable[[Conversion], None] = lambda _: None,
) -> Conversion:
    """Read samples from files in turn and write them to one file. `-` is standard input or output.

    `source` and `target` name formats that cannot be detected. `tell` is called for every sample.

    >>> import tempfile, penstock as ps
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.frame").write_bytes(ps.encode([ps.Sample(id="a", token_ids=[5, 6], rewards=1.0)]))
    >>> convert_files([f"{folder}/a.frame"], f"{folder}/a.jsonl").samples
    1
    >>> (folder / "a.jsonl").read_text()
    '{"id":"a","token_ids":[5,6],"loss_mask":[false,false],"rewards":1.0}\\n'
    """
    options = options or Options()
    places = [Place(word) for word in inputs]
    formats = [named(source, reading=True) if source else format_to_read(place) for place in places]
    into = named(target, reading=False) if target else format_to_write(output)
    done = Conversion(tuple(inputs), tuple(kind.name for kind in formats), output, into.name)
    own: Own = {}

    def samples(lost: Lost) -> Iterator[Sample]:
        for place, kind in zip(places, formats, strict=True):
            yield from _read(kind, place, lost, options)

    rows = samples(done.lost)
    if options.advantages is not None:
        rows = with_advantages(rows, options.advantages)
    if into.name == "parquet":
        # Parquet writes its schema first, so own columns must be known before the first row. Files are read twice for
        # that. A stream cannot be, so its first row group has to show all of them.
        streams = any(place.is_stream for place in places)
        first = list(islice(rows, ROWS)) if streams else []
        own = own_columns_of(first if streams else samples(Lost()))
        rows = chain(first, rows)
    assert into.write is not None
    into.write(done.counted(rows, tell), Place(output), done.lost, options, own)
    return done


def read_samples(word: str, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of a file in any format that can be detected."""
    place = Place(word)
    yield from _read(format_to_read(place), place, lost, Options())


def _read(kind: FileFormat, place: Place, lost: Lost, options: Options) -> Iterator[Sample]:
    assert kind.read is not None
    with unreadable(place.name, kind.name):
        yield from kind.read(place, lost, options)


def with_advantages(samples: Iterable[Sample], rule: str) -> Iterator[Sample]:
    """Yield the samples with advantages computed from rewards, per run of consecutive samples of one group."""
    advantage = advantage_named(rule)
    for group in by_group(samples):
        rewards = [one_number(sample, "rewards") for sample in group]
        if any(reward is None or math.isnan(reward) for reward in rewards):
            name = next(s.id for s, reward in zip(group, rewards, strict=True) if reward is None or math.isnan(reward))
            raise InvalidInput(f"sample {name!r}.rewards: no single reward; advantages need one for every sample")
        values = advantage(Rollouts.of([reward for reward in rewards if reward is not None]))
        yield from (s.replace(advantages=float(value)) for s, value in zip(group, values, strict=True))


# ------------------------------------------------------------------ which format


def named(name: str, *, reading: bool) -> FileFormat:
    """Return the format of that name. Raises InvalidInput if it cannot be read, or written."""
    found = FORMATS.get(name)
    action = "read" if reading else "write"
    able = [kind.name for kind in FORMATS.values() if getattr(kind, action) is not None]
    if found is None or found.name not in able:
        raise InvalidInput(f"format {name!r}: cannot {action} it; use one of {', '.join(able)}")
    return found


def format_to_write(word: str) -> FileFormat:
    """Detect the output format by the file's ending."""
    kind = _by_ending(word, [one for one in FORMATS.values() if one.write is not None and not one.is_folder])
    if kind is None:
        raise InvalidInput(f"{word}: no format has this ending; name one with --to, see --formats")
    return kind


def format_to_read(place: Place) -> FileFormat:
    """Detect the input format by the file's first bytes, or by its ending."""
    if not place.is_stream and place.path.is_dir():
        return FORMATS["prime-rl" if plane_of(place.path) is None else "run"]
    with place.reading() as file:
        start = _start(file, stays=place.is_stream)
    if start.startswith(MAGIC):
        return FORMATS["frames"]
    if start.lstrip()[:1] == b"{":
        found = _by_keys(start)
        if found is not None:
            return found
    if start.startswith(b"PAR1") and not place.is_stream:
        return _parquet(place)
    kind = None if place.is_stream else _by_ending(place.word, list(FORMATS.values()))
    if kind is None or kind.read is None:
        raise InvalidInput(f"{place.name}: unknown format; name it with --from, see --formats")
    return kind


def _start(file: BinaryIO, *, stays: bool) -> bytes:
    """Return the first bytes. A stream is only peeked at: its bytes remain to be read."""
    if not stays:
        return file.read(_LOOK)
    peek = getattr(file, "peek", None)
    return b"" if peek is None else peek(_LOOK)


def _by_ending(word: str, among: Sequence[FileFormat]) -> FileFormat | None:
    found = [(len(ending), kind) for kind in among for ending in kind.endings if word.endswith(ending)]
    return max(found, key=lambda each: each[0])[1] if found else None


def _by_keys(start: bytes) -> FileFormat | None:
    """Detect a format by the fields of the first line. Searches for their names, because the line may be cut."""
    line = start.lstrip().partition(b"\n")[0]
    for kind in FORMATS.values():
        if kind.mark and kind.mark in start[:4096]:
            return kind
        if kind.keys and all(f'"{key}"'.encode() in line for key in kind.keys):
            return kind
    return None


def _parquet(place: Place) -> FileFormat:
    return FORMATS["tokens" if "inference_logprobs" in columns_of(place) else "parquet"]


# ------------------------------------------------------------------ the formats


def _plain(read: Callable[[Place, Lost], Iterator[Sample]]) -> Read:
    return lambda place, lost, options: read(place, lost)  # noqa: ARG005


def _plain_writer(write: Callable[[Iterable[Sample], Place, Lost], None]) -> Write:
    return lambda samples, place, lost, options, own: write(samples, place, lost)  # noqa: ARG005


FORMATS = {
    kind.name: kind
    for kind in (
        FileFormat(
            name="frames",
            summary="Penstock frames, one per group: the neutral form, holds everything",
            endings=(".penstock", ".frame"),
            read=_plain(read_frame_file),
            write=_plain_writer(write_frame_file),
        ),
        FileFormat(
            name="trl",
            summary="TRL rollout samples as JSON lines",
            endings=(".trl.jsonl",),
            keys=("input_ids", "completion_mask", "old_log_probs"),
            read=_plain(read_trl),
            write=_plain_writer(write_trl),
        ),
        FileFormat(
            name="slime",
            summary="slime and miles samples: debug rollout data (.pt), or JSON lines",
            endings=(".pt", ".slime.jsonl"),
            keys=("tokens", "response_length"),
            read=lambda place, lost, options: read_slime(place, lost, options.reward_key),
            write=_plain_writer(write_slime),
        ),
        FileFormat(
            name="agent-lightning",
            summary="Agent Lightning events as JSON lines",
            endings=(".events.jsonl",),
            keys=("rollout_id", "event_type"),
            read=_plain(read_agent_lightning),
        ),
        FileFormat(
            name="verifiers",
            summary="verifiers episodes as JSON lines: traces.jsonl",
            keys=("nodes", "task"),
            read=_plain(read_traces),
        ),
        FileFormat(
            name="atif",
            summary="ATIF trajectories with token ids, of harbor and NeMo-Gym: a JSON file, or JSON lines",
            mark=ATIF_MARK,
            read=_plain(read_atif),
        ),
        FileFormat(
            name="tokens",
            summary="token exports of Penstock's trainer side: JSON lines or Parquet",
            keys=("token_ids", "inference_logprobs"),
            read=_plain(read_export),
        ),
        FileFormat(
            name="run",
            summary="the groups that a run's plane still has, from its folder",
            is_folder=True,
            read=_plain(read_run_groups),
        ),
        FileFormat(
            name="jsonl",
            summary="samples as JSON lines, holds everything",
            endings=(".jsonl",),
            keys=("token_ids",),
            read=_plain(read_lines),
            write=_plain_writer(write_lines),
        ),
        FileFormat(
            name="parquet",
            summary="samples as Parquet, one row each, holds everything",
            endings=(".parquet",),
            read=_plain(read_table),
            write=lambda samples, place, lost, options, own: write_table(samples, place, lost, own),  # noqa: ARG005
        ),
        FileFormat(
            name="verl",
            summary="a verl batch of padded tensors (DataProto), in .npz or .safetensors",
            endings=(".npz", ".safetensors"),
            read=_plain(read_verl),
            write=_plain_writer(write_verl),
        ),
        FileFormat(
            name="prime-rl",
            summary="prime-rl micro-batches: a folder of step_N/rank_R.bin",
            endings=(".bin",),
            is_folder=True,
            read=_plain(read_prime_rl),
            write=lambda samples, place, lost, options, own: write_prime_rl(samples, place, lost, options),  # noqa: ARG005
        ),
    )
}
"""By name. If the fields of one format include those of another, it comes first."""
