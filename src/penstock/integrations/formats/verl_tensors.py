"""Read and write batches of verl: tensors of a `DataProto` or `TensorDict`, prompts padded left, responses right.

    prompts          0 0 p p p              attention_mask   0 0 1 1 1  1 1 1 1 0
    responses                  r r t r 0    response_mask               1 1 0 1 0     t is a tool's token

In memory any mapping of such tensors is read, nested tensors included. `DataProto.save_to_disk` writes a pickle, which
is never opened here; save the tensors with `numpy.savez` or `safetensors.numpy.save_file` instead. Rewards are on the
last token of the response. verl's fields that are not tensors (`uid`, `data_source`) are arrays of text in .npz and
JSON in the metadata of .safetensors.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.arrays import Array, Sample
from penstock.capture import located
from penstock.errors import CorruptFile, InvalidInput
from penstock.extras import require
from penstock.integrations.formats.shared import Lost, Place, once, one_number, prompt_length

_ALONG = {"rollout_log_probs": "logprobs", "advantages": "advantages", "ref_log_prob": "teacher_logprobs"}
"""Columns over the response: verl's name -> ours."""
MAX_BYTES = 4 << 30
"""Limit for all arrays of a file together: a `.npz` file may expand to a thousand times its size."""
_UNREADABLE = (ValueError, OSError, KeyError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
_SCORES = ("rm_scores", "token_level_scores")
_DERIVED = ("input_ids", "position_ids", "attention_mask", "prompts", "responses", "response_mask", "loss_mask")
_TEXT = {"uid": "group", "data_source": "env", "sample_id": "id"}
_VERSION = "min_global_steps"
_TEMPERATURE = "temperature"
"""One for the batch, in `DataProto.meta_info`, or one per row. 0 means that nothing was sampled: it is not read."""
_HOLDS = {
    "input_ids": "token_ids",
    "response_mask": "loss_mask",
    "rm_scores": "rewards",
    "routed_experts": "routed_experts",
    _TEMPERATURE: "temperatures",
    **_ALONG,
    **_TEXT,
}
_READ = (*_DERIVED, *_ALONG, *_SCORES, *_TEXT, _VERSION, _TEMPERATURE, "routed_experts")


def from_verl(batch: Any, *, lost: Lost | None = None, where: str = "batch") -> list[Sample]:
    """Convert a `DataProto`, a `TensorDict` or a mapping of tensors or arrays to samples.

    >>> batch = {"prompts": [[0, 5]], "responses": [[6, 7]], "response_mask": [[1, 0]], "rm_scores": [[1.0, 0.0]]}
    >>> [sample] = from_verl({**batch, "attention_mask": [[0, 1, 1, 0]], "uid": ["17"]})
    >>> sample.token_ids.tolist(), sample.loss_mask.tolist(), float(sample["rewards"]), sample.group
    ([5, 6], [False, True], 1.0, '17')
    """
    fields = _fields(batch)
    flat = [name for name in fields if _is_single(fields[name], f"{where}: {name}")]
    if flat and flat != [_TEMPERATURE]:  # one temperature may hold for all rows
        name = next(name for name in flat if name != _TEMPERATURE)
        raise InvalidInput(f"{where}: {name} is a single value; a batch has one per sample")
    missing = [name for name in ("prompts", "responses") if name not in fields]
    if missing:
        raise InvalidInput(f"{where}: no {missing[0]}; a batch has prompts and responses, it has {', '.join(fields)}")
    rows = len(fields["responses"])
    if _TEMPERATURE in fields:
        fields[_TEMPERATURE] = _temperatures(fields[_TEMPERATURE], rows, where)
    if lost is not None:
        lost.unread.update({name: rows for name in fields if name not in _READ})
        if (greedy := int((fields.get(_TEMPERATURE, np.ones(1)) <= 0).sum())) > 0:
            lost.unread[_TEMPERATURE] += greedy
    return [_row(fields, i, f"{where} row {i}") for i in range(rows)]


def _row(fields: Mapping[str, Any], i: int, where: str) -> Sample:
    try:
        return _sample(fields, i, where)
    except InvalidInput:
        raise
    except (TypeError, ValueError, LookupError, OverflowError, MemoryError) as error:
        raise InvalidInput(
            f"{where}: {error!s:.200}; give arrays of numbers, [rows, tokens] each, and one version per row"
        ) from None


def _is_single(value: Any, where: str) -> bool:
    try:
        return np.ndim(value) == 0 or not hasattr(value, "__len__")
    except ValueError:
        raise InvalidInput(f"{where}: rows of different lengths; pad them, as verl does") from None


def _temperatures(value: Any, rows: int, where: str) -> Array:
    """Return one temperature per row."""
    try:
        found = np.asarray(value)
        if found.size not in (1, rows):  # before it is converted: values of no bytes would become gigabytes
            raise ValueError  # noqa: TRY301 - the same sentence as for what numpy refuses
        return np.broadcast_to(found.astype(np.float32).reshape(-1), rows)
    except (TypeError, ValueError):
        raise InvalidInput(f"{where}: temperature: give one number, or one for each of {rows} rows") from None


def to_verl(samples: Sequence[Sample], *, pad_id: int = 0, lost: Lost | None = None) -> dict[str, Array]:
    """Make arrays, texts included, for `DataProto.from_single_dict`. Omits columns that not all samples have.

    >>> batch = to_verl([Sample(id="a", group="17", token_ids=[5, 6, 7], loss_mask=[0, 1, 1], rewards=1.0)])
    >>> batch["prompts"].tolist(), batch["responses"].tolist(), batch["rm_scores"].tolist()
    ([[5]], [[6, 7]], [[0.0, 1.0]])
    """
    if not samples:
        raise InvalidInput("samples: empty; a batch needs at least one")
    starts = [prompt_length(sample) for sample in samples]
    width, length = max(starts), max(s.num_tokens - start for s, start in zip(samples, starts, strict=True))
    fill = _Padded(samples, starts, width, length)
    ids, present = (
        [sample.token_ids for sample in samples],
        fill.whole([np.ones(s.num_tokens) for s in samples], np.int64),
    )
    input_ids = fill.whole(ids, np.int64, pad_id)
    mask = fill.behind([sample.loss_mask for sample in samples], np.int64)
    batch = {
        "prompts": input_ids[:, :width],
        "responses": input_ids[:, width:],
        "input_ids": input_ids,
        "attention_mask": present,
        "position_ids": np.maximum(np.cumsum(present, 1) - 1, 0) * present,
        "response_mask": mask,
    }
    batch |= _columns(samples, fill)
    batch |= {name: np.array([getattr(sample, ours) for sample in samples]) for name, ours in _TEXT.items()}
    versions = [-1 if sample.policy_version is None else sample.policy_version for sample in samples]
    if lost is not None:
        held = [ours for name, ours in _HOLDS.items() if name in batch]
        for sample in samples:
            lost.columns(sample, held=(*held, "policy_version"))
    return {**batch, _VERSION: np.array(versions, np.int64)}


def _columns(samples: Sequence[Sample], fill: _Padded) -> dict[str, Array]:
    """Return the columns that all samples have."""
    batch: dict[str, Array] = {}
    for name, ours in _ALONG.items():
        if all(ours in sample for sample in samples):
            batch[name] = fill.behind([_filled(sample, ours) for sample in samples], np.float32)
    if all("rewards" in sample and sample.loss_tokens and not np.isnan(sample["rewards"]).any() for sample in samples):
        batch["rm_scores"] = fill.behind([_scores(sample) for sample in samples], np.float32)
    temperatures = [one_number(sample, "temperatures") for sample in samples]
    if None not in temperatures:
        batch[_TEMPERATURE] = np.array(temperatures, np.float32)
    experts = [sample["routed_experts"] for sample in samples if "routed_experts" in sample]
    if len(experts) == len(samples) and len({cells.shape[1:] for cells in experts}) == 1:
        batch["routed_experts"] = fill.whole(experts, np.result_type(*experts))
    return batch


class _Padded:
    """Pads the rows of a batch so that all responses begin in the same column.

    Prompts of 2 and 3 tokens, width 3: the first row starts at 3 - 2 = 1, the second at 0.
    """

    def __init__(self, samples: Sequence[Sample], starts: list[int], width: int, length: int) -> None:
        self._starts, self._width, self._length, self._rows = starts, width, length, len(samples)

    def whole(self, values: Sequence[Array], dtype: Any, pad: int = 0) -> Array:
        """[rows, prompt + response, ...]"""
        out = np.full((self._rows, self._width + self._length, *values[0].shape[1:]), pad, dtype)
        for row, start, cells in zip(out, self._starts, values, strict=True):
            row[self._width - start : self._width - start + len(cells)] = cells
        return out

    def behind(self, values: Sequence[Array], dtype: Any) -> Array:
        """[rows, response]"""
        return self.whole(values, dtype)[:, self._width :]


def _filled(sample: Sample, name: str) -> Array:
    """Return a column per token, with 0 for NaN, and for advantages on tokens that are not trained."""
    values = np.nan_to_num(np.broadcast_to(sample[name], sample.num_tokens), nan=0.0)
    return np.where(sample.loss_mask, values, np.float32(0)) if name == "advantages" else values


def _scores(sample: Sample) -> Array:
    """Return [T] scores: a single reward on the last token, rewards per token unchanged."""
    rewards: Array = sample["rewards"]
    if rewards.ndim:
        return rewards
    out = np.zeros(sample.num_tokens, np.float32)
    out[-1] = rewards
    return out


# ------------------------------------------------------------------ reading


def _fields(batch: Any) -> dict[str, Any]:
    """Return tensors and texts by name. A DataProto holds them in two parts."""
    if hasattr(batch, "non_tensor_batch"):
        tensors = {} if batch.batch is None else dict(batch.batch.items())
        whole = getattr(batch, "meta_info", None) or {}
        given = {_TEMPERATURE: whole[_TEMPERATURE]} if whole.get(_TEMPERATURE) is not None else {}
        return {**given, **tensors, **batch.non_tensor_batch}
    return dict(batch.items())


def _cells(value: Any, i: int) -> Array:
    """Return one row of a tensor, an array or a list. Rows of a nested tensor have no padding."""
    row = value[i] if not getattr(value, "is_nested", False) else value.unbind()[i]
    return np.asarray(row.detach().cpu().numpy() if hasattr(row, "detach") else row)


def _sample(fields: Mapping[str, Any], i: int, at: str) -> Sample:
    prompt, response = _cells(fields["prompts"], i), _cells(fields["responses"], i)
    width = len(prompt)
    attention = _attention(fields, i, len(prompt) + len(response), at)
    first, count = int(attention[:width].argmax()) if attention[:width].any() else width, int(attention[width:].sum())
    start = width - first
    along = slice(0, count)
    mask = next((_cells(fields[n], i) for n in ("response_mask", "loss_mask") if n in fields), np.ones(len(response)))
    columns: dict[str, Any] = {"loss_mask": _behind(mask[-len(response) or None :][along] != 0, start, np.bool_)}
    for name, ours in _ALONG.items():
        if name in fields:
            columns[ours] = _behind(_cells(fields[name], i)[along], start, np.float32)
    if "advantages" in columns:
        columns["advantages"] = once(columns["advantages"], columns["loss_mask"])
    scores = next((_cells(fields[name], i)[along] for name in _SCORES if name in fields), None)
    columns["rewards"] = None if scores is None else _reward(_behind(scores, start, np.float32))
    if _TEMPERATURE in fields and fields[_TEMPERATURE][i] > 0:
        columns["temperatures"] = fields[_TEMPERATURE][i]
    if "routed_experts" in fields:
        columns["routed_experts"] = _cells(fields["routed_experts"], i)[first : width + count]
    facts: dict[str, Any] = {ours: str(fields[name][i]) for name, ours in _TEXT.items() if name in fields}
    version = int(_cells(fields[_VERSION], i)) if _VERSION in fields else -1
    with located(at):
        return Sample(
            **{"id": f"{facts.get('group', '')}/{i}", **facts},
            policy_version=None if version < 0 else version,
            token_ids=np.concatenate([prompt[first:], response[along]]),
            **columns,
        )


def _attention(fields: Mapping[str, Any], i: int, count: int, where: str) -> Array:
    if "attention_mask" in fields:
        mask: Array = _cells(fields["attention_mask"], i) != 0
        if len(mask) == count:
            return mask
        raise InvalidInput(f"{where}.attention_mask: {len(mask)} values for {count} tokens of prompt and response")
    if all(getattr(fields[name], "is_nested", False) for name in ("prompts", "responses")):
        return np.ones(count, np.bool_)
    raise InvalidInput(f"{where}: no attention_mask; without it padding looks like tokens")


def _behind(values: Array, start: int, dtype: Any) -> Array:
    return np.concatenate([np.zeros(start, dtype), values.astype(dtype)])


def _reward(scores: Array) -> Array:
    """Return the single reward of a row, whichever token it is on, or all scores if there are several."""
    found = np.flatnonzero(scores)
    return scores if len(found) > 1 else scores[found[0] if len(found) else -1].reshape(())


# ------------------------------------------------------------------ files


def read_verl(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of an .npz or .safetensors file."""
    try:
        fields = _npz(place) if place.is_zip else _safetensors(place)
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise CorruptFile(
            f"{place.name}: {error!s:.300}; give tensors in .npz or .safetensors; a pickled DataProto is not opened"
        ) from None
    yield from from_verl(fields, lost=lost, where=place.name)


def _npz(place: Place) -> dict[str, Any]:
    with zipfile.ZipFile(place.path) as parts:
        other = next((name for name in parts.namelist() if not name.endswith(".npy")), None)
        size = sum(part.file_size for part in parts.infolist())
    if other is not None:
        raise ValueError(f"holds {other}, which is not an array")
    if size > MAX_BYTES:
        raise ValueError(f"would expand to {size} bytes; the limit is {MAX_BYTES}; split the file")
    with np.load(place.path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _safetensors(place: Place) -> dict[str, Any]:
    require("safetensors files", "safetensors")
    from safetensors import SafetensorError, safe_open

    size = place.path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"holds {size} bytes; the limit is {MAX_BYTES}; split the file")
    try:
        with safe_open(place.path, framework="numpy") as file:
            texts = json.loads((file.metadata() or {}).get("non_tensor_batch", "{}"))
            if not isinstance(texts, dict):
                raise ValueError("non_tensor_batch in its metadata is no JSON object")  # noqa: TRY004 - caught below
            return {**{name: file.get_tensor(name) for name in file.keys()}, **texts}  # noqa: SIM118 - not a mapping
    except (SafetensorError, TypeError, AttributeError) as error:  # the latter for dtypes that numpy does not have
        raise ValueError(f"{error!s:.200}; give dtypes that numpy has") from None


def write_verl(samples: Iterable[Sample], place: Place, lost: Lost) -> None:
    """Write all samples as one batch. All of them are in memory, and will be for the reader too."""
    rows = [sample for sample in samples if lost.keeps(sample)]
    batch = to_verl(rows, lost=lost)
    if place.path.suffix != ".safetensors":
        with place.writing() as file:
            np.savez_compressed(file, **batch)  # type: ignore[arg-type]
        return
    require("safetensors files", "safetensors")
    from safetensors.numpy import save

    texts = {name: batch.pop(name).tolist() for name in _TEXT}
    with place.writing() as file:
        tensors = {name: np.ascontiguousarray(array) for name, array in batch.items()}
        file.write(save(tensors, metadata={"non_tensor_batch": json.dumps(texts)}))
