"""Read and write samples of slime and miles: the files of `--save-debug-rollout-data`.

    torch.save({"rollout_id": 7, "samples": [Sample.to_dict(), ...]}, "rollout_7.pt")

Files are loaded with `weights_only=True`, so they cannot run code; one that needs more is rejected. JSON lines of
`Sample.to_dict()` are supported too. Fields that a slime sample lacks (ids, environment, mode, ...) are written to its
`metadata`, under `penstock`, and read back from there.

In slime, log-probabilities, masks and kept ids cover the response only, and routed experts all tokens but the last,
which no forward pass follows. slime computes advantages from rewards itself and has no field for them.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from penstock.arrays import COLUMNS, TEXT_COLUMNS, Array, Ragged, Sample, coerce
from penstock.capture import (
    Trajectory,
    located,
    numbers_of,
    optional_list,
    optional_mapping,
    required,
    sampling_mask_of,
)
from penstock.errors import CorruptFile, InvalidInput, shown
from penstock.extras import require
from penstock.integrations.formats.shared import (
    Lost,
    Place,
    behind_prompt,
    json_lines,
    lists_behind_prompt,
    one_number,
    prompt_length,
    to_trajectory,
)

HELD = (
    *("token_ids", "loss_mask", "logprobs", "rewards", "teacher_logprobs", "sampling_mask", "routed_experts"),
    *(*TEXT_COLUMNS, "policy_version"),
)
_READ = (
    *("tokens", "response_length", "loss_mask", "reward", "rollout_log_probs", "teacher_log_probs", "remove_sample"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts", "weight_versions"),
    *("group_index", "index", "rollout_id", "metadata", "status", "spec_info", "prefix_cache_info"),
    *("non_generation_time", "response"),
)
_KEY = "penstock"
MAX_BYTES = 16 << 30
"""Limit for all tensors of a file together."""
_EXPANDED, _NUMBER_BYTES, _MAX_DEPTH = 16, 8, 64
"""Times the file's size that a sample may take: a number in a list is one byte of the file at least, and eight in an
array. Values may be nested as deep as a numpy array may have dimensions."""
_FAILED = {"aborted": "aborted", "failed": "failed"}


def from_slime(
    record: Any,
    *,
    reward_key: str | None = None,
    rollout: int | None = None,
    id: str | None = None,  # noqa: A002 - the field's own name
    lost: Lost | None = None,
) -> Sample:
    """Convert a slime or miles `Sample`, or its `to_dict()`.

    `rollout` is the rollout's number. `id` names a sample that has no index.

    >>> record = {"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-0.5, -0.25], "reward": 1.0}
    >>> sample = from_slime(record | {"group_index": 4, "index": 9})
    >>> sample.id, sample.group, sample.loss_mask.tolist(), sample["logprobs"].tolist()
    ('4/9', '4', [False, True, True], [0.0, -0.5, -0.25])
    """
    fields = _fields(record)
    metadata = dict(optional_mapping(fields, "metadata", "sample"))
    kept = {name: value for name, value in optional_mapping(metadata, _KEY, "metadata").items() if name in TEXT_COLUMNS}
    metadata.pop(_KEY, None)
    group = str(fields["group_index"]) if fields.get("group_index") is not None else ""
    group = f"{rollout}/{group}" if rollout is not None and group else group
    name = f"{group}/{fields.get('index')}" if fields.get("index") is not None else id
    where = f"sample {kept.get('id', name)!r}"
    if lost is not None:
        lost.fields({**fields, "metadata": metadata}, known=[name for name in _READ if name != "metadata"])
        lost.unread.update(["status"] if _status(fields) not in ("", "completed", "pending") else [])
    ids = coerce(COLUMNS["token_ids"], numbers_of(required(fields, "tokens", where), where), f"{where}.tokens")
    columns = _columns(fields, len(ids), where)
    reward = _reward(fields.get("reward"), reward_key, where)
    return Sample(
        **{
            "id": name,
            "group": group,
            "policy_version": _version(optional_list(fields, "weight_versions", where)),
            **kept,
        },
        token_ids=ids,
        rewards=reward,
        **columns,
    )


def _fields(record: Any) -> Mapping[str, Any]:
    fields = record.to_dict() if hasattr(record, "to_dict") else record
    if not isinstance(fields, Mapping):
        raise InvalidInput(f"sample: a {type(record).__name__}; must be a Sample, or its to_dict()")
    return fields


def slime_trajectory(record: Any, *, reward_key: str | None = None) -> Trajectory:
    """Convert a slime or miles `Sample` to a trajectory. Failed and aborted ones have an error and train nothing."""
    fields = _fields(record)
    status = _status(fields)
    sample = from_slime(fields, reward_key=reward_key)
    return to_trajectory(sample, id=sample.id, truncated=status == "truncated", error=_FAILED.get(status))


def to_slime(sample: Sample, *, group_index: int, index: int, lost: Lost | None = None) -> dict[str, Any]:
    """Convert a sample to a dict for `Sample.from_dict` of slime and miles."""
    if lost is not None:
        lost.columns(sample, held=HELD)
        lost.unwritten.update(["rewards"] if "rewards" in sample and one_number(sample, "rewards") is None else [])
    start = prompt_length(sample)
    response = sample.num_tokens - start
    reward = one_number(sample, "rewards")
    facts = {name: value for name, c in TEXT_COLUMNS.items() if (value := getattr(sample, name)) != c.fill}
    if sample.rollout:
        facts["rollout"] = msgspec.json.decode(sample.rollout)
    record: dict[str, Any] = {
        "group_index": group_index,
        "index": index,
        "tokens": sample.token_ids.tolist(),
        "response_length": response,
        "loss_mask": sample.loss_mask[start:].astype(np.int64).tolist(),
        "reward": None if reward != reward else reward,
        "weight_versions": [] if sample.policy_version is None else [str(sample.policy_version)],
        "status": "completed",
        "metadata": {_KEY: facts},
    }
    for name, field in (("logprobs", "rollout_log_probs"), ("teacher_logprobs", "teacher_log_probs")):
        if name in sample:
            record[field] = np.nan_to_num(sample[name][start:], nan=0.0).tolist()
    if "sampling_mask" in sample:
        kept: Ragged = sample["sampling_mask"][start:]
        record |= {
            "rollout_top_p_token_ids": kept.values.tolist(),
            "rollout_top_p_token_offsets": kept.offsets.tolist(),
        }
    if "routed_experts" in sample:
        record["rollout_routed_experts"] = sample["routed_experts"][:-1].astype(np.int32)
    return record


def _columns(fields: Mapping[str, Any], count: int, where: str) -> dict[str, Any]:
    length = fields.get("response_length") or 0
    if not isinstance(length, int) or not 0 <= length <= count:
        raise InvalidInput(f"{where}.response_length: {shown(length)} of {count} tokens; must be from 0 to {count}")
    start = count - length
    mask = numbers_of(fields.get("loss_mask"), where)
    trained = np.ones(length, np.bool_) if mask is None else mask
    if fields.get("remove_sample"):
        trained = np.zeros(length, np.bool_)
    columns: dict[str, Any] = {"loss_mask": behind_prompt("loss_mask", trained, start, count, f"{where}.loss_mask")}
    for name, field in (("logprobs", "rollout_log_probs"), ("teacher_logprobs", "teacher_log_probs")):
        if fields.get(field) is not None:
            values = numbers_of(fields[field], where)
            columns[name] = behind_prompt(name, values, start, count, f"{where}.{field}")
    kept = sampling_mask_of(fields, where)
    if kept is not None:
        columns["sampling_mask"] = lists_behind_prompt(kept, start, count, f"{where}.rollout_top_p_token_offsets")
    experts = fields.get("rollout_routed_experts")
    if experts is not None:
        at = f"{where}.rollout_routed_experts"
        columns["routed_experts"] = _experts(coerce(COLUMNS["routed_experts"], numbers_of(experts, at), at), count, at)
    return columns


def _experts(rows: Array, count: int, where: str) -> Array:
    """Return rows for all tokens. The last one, which no forward pass follows, is zero if it is missing."""
    if len(rows) not in (count - 1, count):
        raise InvalidInput(f"{where}: shape {rows.shape} for {count} tokens; give [{count - 1}, layers, k]")
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


def _reward(reward: Any, key: str | None, where: str) -> float | None:
    if isinstance(reward, Mapping):
        if key is None or key not in reward:
            raise InvalidInput(
                f"{where}.reward: a mapping with {', '.join(map(repr, reward))}; name one with reward_key "
                "(--reward-key)"
            )
        reward = reward[key]
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise InvalidInput(f"{where}.reward: {reward!r:.40}; must be a number")
    return reward


def _version(versions: Any) -> int | None:
    """Return the lowest version that is a number."""
    # Python converts at most 4,300 digits. 20 digits are too many for a sample, which says so.
    numbers = [int(str(v).lstrip("0")[:20] or 0) for v in versions if str(v).isascii() and str(v).isdecimal()]
    return min(numbers, default=None)


def _status(fields: Mapping[str, Any]) -> str:
    status = fields.get("status") or ""
    return str(getattr(status, "value", status))


# ------------------------------------------------------------------ files


def read_slime(place: Place, lost: Lost, reward_key: str | None = None) -> Iterator[Sample]:
    """Yield the samples of a torch file or of JSON lines."""
    if not place.is_stream and place.is_zip:
        loaded = _load(place)
        records = ((f"{place.name} samples[{i}]", record) for i, record in enumerate(loaded["samples"]))
        yield from _read(records, place, loaded.get("rollout_id"), reward_key, lost)
        return
    yield from _read(json_lines(place), place, None, reward_key, lost)


def _read(
    records: Iterable[tuple[str, Any]], place: Place, rollout: Any, key: str | None, lost: Lost
) -> Iterator[Sample]:
    number = rollout if isinstance(rollout, int) else None
    for i, (where, record) in enumerate(records):
        with located(where):
            yield from_slime(record, reward_key=key, rollout=number, id=f"{place.short}:{i}", lost=lost)


def _load(place: Place) -> dict[str, Any]:
    require("slime files", "torch")
    import torch

    kinds = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in ("u1", "u2", "i2", "i4", "i8", "f4", "f8"))]
    rebuild = np.zeros(0).__reduce__()[0]  # miles' files contain numpy arrays
    _check_stored(place)
    try:
        with torch.serialization.safe_globals([rebuild, *kinds]):
            loaded = torch.load(place.path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - torch raises a dozen types here
        raise CorruptFile(
            f"{place.name}: {str(error).splitlines()[0]:.200}; only tensors, arrays and plain values are loaded; save "
            "Sample.to_dict() without other objects, or as JSON lines"
        ) from None
    if not isinstance(loaded, dict) or not isinstance(loaded.get("samples"), list):
        raise InvalidInput(f"{place.name}: no 'samples' in it; give a file of --save-debug-rollout-data")
    _check_sizes(loaded["samples"], place.name, place.path.stat().st_size)
    return loaded


def _check_stored(place: Place) -> None:
    """Raise CorruptFile for a compressed file: torch never writes one, and a few bytes could expand to any size."""
    try:
        with zipfile.ZipFile(place.path) as archive:
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise CorruptFile(f"{place.name}: {error}; not a file of torch.save") from None
    if packed:
        raise CorruptFile(f"{place.name}: has compressed entries, which torch.save does not write; save it again")


def _check_sizes(samples: list[Any], name: str, file_bytes: int) -> None:
    """Raise CorruptFile if values are larger than the file: expanded tensors, and lists or tensors that are in a sample
    many times, cost nothing until they are copied. Also for lists that contain themselves.

    A list of a list of a list, each a thousand times, is 3 kB in the file and 8 GB as an array.
    """
    total, sizes = 0, _Sizes(name)
    most = _EXPANDED * file_bytes + (1 << 20)
    for i, sample in enumerate(samples):
        total += (size := sizes.of(sample))
        if size > most:
            raise CorruptFile(
                f"{name} samples[{i}]: {size:,} bytes in a file of {file_bytes:,}; save each value once, expanded "
                "tensors with .contiguous()"
            )
    if total > MAX_BYTES:
        raise CorruptFile(f"{name}: tensors of {total:,} bytes; the limit is {MAX_BYTES:,}; split the file")


class _Sizes:
    """Sizes of nested values as arrays. A value that occurs several times is measured once, and counted each time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[int, int] = {}

    def of(self, value: Any, depth: int = 0) -> int:
        if depth > _MAX_DEPTH:
            raise CorruptFile(f"{self._name}: lists more than {_MAX_DEPTH} deep, or in themselves; save plain values")
        if isinstance(value, list | tuple | Mapping):
            found = self._known.get(id(value))
            if found is None:
                found = self._known[id(value)] = self._of_items(value, depth)
            return found
        if isinstance(value, np.ndarray):
            return value.nbytes
        return self._of_tensor(value) if hasattr(value, "untyped_storage") else _NUMBER_BYTES

    def _of_items(self, value: Any, depth: int) -> int:
        items = value.values() if isinstance(value, Mapping) else value
        others = [one for one in items if not isinstance(one, int | float | str)]
        return _NUMBER_BYTES * (len(value) - len(others)) + sum(self.of(one, depth + 1) for one in others)

    def _of_tensor(self, value: Any) -> int:
        try:
            size, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        except (NotImplementedError, RuntimeError) as error:
            raise CorruptFile(f"{self._name}: {str(error).splitlines()[0]:.200}; save dense tensors") from None
        if size > stored:
            raise CorruptFile(
                f"{self._name}: a tensor of {size:,} bytes with {stored:,} bytes of data; save expanded tensors with "
                ".contiguous()"
            )
        return int(size)


def write_slime(samples: Iterable[Sample], place: Place, lost: Lost) -> None:
    """Write a torch file if the name ends in .pt, else JSON lines."""
    if place.is_stream or place.path.suffix != ".pt":
        with place.writing() as file:
            for record in _records(samples, lost):
                if "rollout_routed_experts" in record:
                    record["rollout_routed_experts"] = record["rollout_routed_experts"].tolist()
                file.write(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        return
    require("slime files", "torch")
    import torch

    records = list(_records(samples, lost))
    for record in records:
        if "rollout_routed_experts" in record:
            record["rollout_routed_experts"] = torch.from_numpy(record["rollout_routed_experts"])
    with place.writing() as file:
        torch.save({"rollout_id": 0, "samples": records}, file)


def _records(samples: Iterable[Sample], lost: Lost) -> Iterator[dict[str, Any]]:
    groups: dict[str, int] = {}
    for index, sample in enumerate(sample for sample in samples if lost.keeps(sample)):
        group = groups.setdefault(sample.group or sample.id, len(groups))
        yield to_slime(sample, group_index=group, index=index, lost=lost)
