"""Read cumulative steps, each with the complete prompt of its turn, as agent frameworks record them.

A step has `prompt_ids`, `completion_ids`, and optionally `completion_mask`, `completion_logprobs`, `routed_experts`,
`mm_token_type_ids`, `images` or `multi_modal_data` (descriptors, never pixels), `temperature`, and the ids each token
was drawn from (`sampling_mask`, or `top_p_token_ids` with `top_p_token_offsets`). It may have them under `tokens`.
Mappings and objects are read alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import COLUMNS, ImageSpan, Values, coerce
from penstock.capture.fold import Step, fold
from penstock.capture.image_descriptors import HashLookup, read_descriptors, read_span
from penstock.capture.records import ABSENT, field_of, ids_of, list_of, optional_mapping, required
from penstock.capture.server_columns import read_routing, sampling_mask_of
from penstock.capture.trajectory import Trajectory
from penstock.errors import InvalidInput


def from_steps(
    steps: Iterable[Any],
    *,
    temperature: float | None = None,
    image_hashes: HashLookup | None = None,
    **fields: Any,
) -> Trajectory:
    """Return the trajectory of cumulative steps. `fields` are those of `Trajectory` (`id`, `reward`, `env`, ...).

    Images come as `images` (spans) or as `multi_modal_data` (hashes, placeholders and grids). If the hashes there are
    not the sha256 of the images' bytes, `image_hashes` must map each of them to it.

    >>> t = from_steps([
    ...     {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-0.5]},
    ...     {"prompt_ids": [1, 2, 3, 4], "completion_ids": [5], "completion_logprobs": [-0.25]},
    ... ], reward=1.0)
    >>> [turn.token_ids.tolist() for turn in t.turns]
    [[1, 2], [3], [4], [5]]
    """
    name = f"trajectory {fields['id']!r}" if fields.get("id") else "trajectory"
    return fold(
        (_step(step, f"{name} steps[{i}]", temperature, image_hashes) for i, step in enumerate(steps)), **fields
    )


def from_rollout(output: Any, **fields: Any) -> Trajectory:
    """Return the trajectory of a complete rollout record: `trajectory` (its steps), `reward`, `error`, `is_truncated`,
    `stop_condition`, `metrics`, `timing` and `sampling_args`, as the first generation of verifiers returned it.
    """
    name = str(field_of(output, "trajectory_id") or field_of(output, "example_id", ""))
    where = f"rollout {name!r}"
    error = field_of(output, "error")
    sampling = field_of(output, "sampling_args") or {}
    milliseconds = field_of(field_of(output, "timing"), "total_ms")
    read = {
        "id": name,
        "reward": field_of(output, "reward"),
        "error": None if error is None else str(error)[:500],
        "truncated": bool(field_of(output, "is_truncated", False)),
        "stop_condition": str(field_of(output, "stop_condition") or ""),
        "metrics": optional_mapping(output, "metrics", where),
        "seconds": milliseconds / 1000 if isinstance(milliseconds, int | float) and milliseconds >= 0 else None,
        "temperature": field_of(sampling, "temperature"),
    }
    return from_steps(list_of(output, "trajectory", where), **{**read, **fields})


def _step(step: Any, where: str, temperature: float | None, lookup: HashLookup | None) -> Step:
    tokens = field_of(step, "tokens", ABSENT)
    tokens = step if tokens is ABSENT else required(step, "tokens", where)
    prompt, completion = ids_of(tokens, "prompt_ids", where), ids_of(tokens, "completion_ids", where)
    _check_prompt_mask(field_of(tokens, "prompt_mask"), len(prompt), f"{where}.prompt_mask")
    own = field_of(tokens, "temperature")
    types = _types(field_of(tokens, "mm_token_type_ids"), len(prompt) + len(completion), where)
    columns: dict[str, Values | None] = {
        "temperatures": temperature if own is None else own,
        "sampling_mask": sampling_mask_of(tokens, where),
    }
    return Step(
        where=where,
        prompt_ids=prompt,
        completion_ids=completion,
        mask=field_of(tokens, "completion_mask"),
        logprobs=field_of(tokens, "completion_logprobs"),
        columns={name: value for name, value in columns.items() if value is not None},
        types=types,
        routing=read_routing(field_of(tokens, "routed_experts"), f"{where}.routed_experts"),
        images=_images(tokens, types, lookup, where),
    )


def _check_prompt_mask(mask: Any, count: int, where: str) -> None:
    if mask is None:
        return
    marks = coerce(COLUMNS["loss_mask"], mask, where)
    if len(marks) != count:
        raise InvalidInput(f"{where}: {len(marks)} values for {count} tokens; give one per token")
    if marks.any():
        at = int(np.argmax(marks))
        raise InvalidInput(f"{where}[{at}]: True; a prompt was not sampled in its own step, so it has no logprobs")


def _types(types: Any, count: int, where: str) -> NDArray[np.uint8] | None:
    if types is None:
        return None
    values = coerce(COLUMNS["mm_token_type_ids"], types, f"{where}.mm_token_type_ids")
    if len(values) != count:
        raise InvalidInput(f"{where}.mm_token_type_ids: {len(values)} values for {count} tokens of prompt + completion")
    return values


def _images(
    tokens: Any, types: NDArray[np.uint8] | None, lookup: HashLookup | None, where: str
) -> tuple[ImageSpan, ...]:
    if field_of(tokens, "images") is None:
        described = field_of(tokens, "multi_modal_data")
        return read_descriptors(described, types, lookup, f"{where}.multi_modal_data") if described else ()
    return tuple(read_span(image, f"{where}.images[{i}]") for i, image in enumerate(list_of(tokens, "images", where)))
