"""Read verifiers episodes and traces: a graph of messages, each with the tokens it added.

Takes the objects of the `verifiers` package (0.4.0, and 0.4.1 by its pre-releases), their `model_dump()`, what comes
off its msgpack wire (arrays as `__nd__` mappings) and `to_record()` JSON. Prefer the objects or
`model_dump(mode="python")`: a record rounds log-probabilities to four decimals unless made with
`to_record(float_decimals=None)`, and leaves out routed experts, sampling masks and the sampler's top-k. The package
itself is not imported.

One trace becomes one trajectory; a path through its graph becomes one sample. If the harness did not continue from a
compaction attempt, the tokens that no other path shares are left out, as verifiers itself leaves that path out of
training. Trainer annotations (`trainer_logprobs`, `entropies`) are not read, because they are not inputs of training.

An episode's traces are independent: one whose agent never got a turn, or that the environment dropped
(`trace.dropped`), is left out alone, and the others stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.arrays import COLUMNS, NO_VERSION, Array, Column, ImageSpan, Ragged, Values, coerce, offsets_of
from penstock.capture.chat import read_versions
from penstock.capture.records import (
    array_of,
    field_of,
    ids_of,
    list_of,
    number_of,
    numbers_of,
    optional_list,
    optional_mapping,
)
from penstock.capture.server_columns import by_counts, sampling_mask_of
from penstock.capture.trajectory import Trajectory
from penstock.capture.turn import TURN_COLUMNS, Turn
from penstock.errors import InvalidInput, shown

ImageLookup = Callable[[str], ImageSpan]
"""Maps an image's URL to its hash and grid; the reader sets offset and length."""

SAMPLER_TOPK = (
    Column("sampler_topk_ids", dtype="uint32", ragged=True),
    Column("sampler_topk_logprobs", dtype="float32", ragged=True),
)
"""Columns of `node.top_logprobs`: per sampled token the sampler's likeliest ids, and their log-probabilities."""

_LIMITS = (
    *("max_turns", "max_turn_tokens", "max_input_tokens", "max_output_tokens", "max_total_tokens"),
    "compaction_failed",
)


def from_verifiers(record: Any, *, images: ImageLookup | None = None, **fields: Any) -> list[Trajectory]:
    """Return one trajectory per trace of an episode whose agent is trained (or of the one trace given).

    Traces without a message, and those that the environment dropped, are left out. `images` looks an image up by the
    URL in its message; needed only where a trace holds image tokens. `fields` overrides fields of `Trajectory`. The
    group, task and episode of a trace are in its `info`. The sampler's top-k, if recorded, becomes the columns
    `SAMPLER_TOPK`: declare them where the plane is opened.
    """
    if field_of(record, "traces") is None:
        return [_trajectory(record, images, fields)]
    shared = {**_episode_fields(record), **fields}
    traces = list_of(record, "traces", f"episode {field_of(record, 'id', '')!r}")
    return [_trajectory(trace, images, shared) for trace in traces if _is_trained(trace)]


def _is_trained(trace: Any) -> bool:
    trainable = field_of(field_of(trace, "agent"), "trainable", True)
    return bool(trainable) and field_of(trace, "dropped") is None and not is_silent(trace)


def is_silent(trace: Any) -> bool:
    """Return whether a trace has no message at all: its agent never got a turn."""
    nodes = field_of(trace, "nodes")
    return isinstance(nodes, list | tuple) and not nodes


def _episode_fields(episode: Any) -> dict[str, Any]:
    env, group, run = (field_of(episode, name) for name in ("env", "group", "run"))
    policy = field_of(field_of(run, "work"), "policy")
    info = {"episode": field_of(episode, "id", ""), "group": field_of(group, "id")}
    found: dict[str, Any] = {
        "env": field_of(env, "name") or field_of(env, "id", ""),
        "run": field_of(run, "id") or "",
        "policy_version": field_of(policy, "start"),
        "info": {name: value for name, value in info.items() if value is not None},
    }
    failure = failure_of(episode, f"episode {field_of(episode, 'id', '')!r}")
    if failure is not None:
        found["error"] = failure
    return found


def _trajectory(trace: Any, images: ImageLookup | None, fields: Mapping[str, Any]) -> Trajectory:
    name = str(field_of(trace, "id", ""))
    where = f"trace {name!r}"
    nodes = list_of(trace, "nodes", where)
    if not nodes:
        raise InvalidInput(f"{where}.nodes: empty; a rollout needs at least one message")
    parents = _parents(nodes, where)
    temperatures = _temperatures(trace, where)
    types = _type_map(trace, where)
    streams = {s for i, node in enumerate(nodes) for s in optional_mapping(node, "loss_weights", f"{where} nodes[{i}]")}
    kept = _without_dangling_attempts(nodes, parents, where)
    turns = [
        _turn(nodes[i], temperatures.get(i, temperatures[-1]), types, streams, images, f"{where} nodes[{i}]")
        for i in kept
    ]
    place = {node: turn for turn, node in enumerate(kept)}
    task = field_of(field_of(trace, "task"), "key")
    info = {**fields.get("info", {}), **({} if task is None else {"task": task})}
    read = {**_outcome(trace, where), "id": name, "agent": field_of(field_of(trace, "agent"), "name", "") or ""}
    return Trajectory(
        turns=turns,
        parents=[-1 if parents[i] < 0 else place[parents[i]] for i in kept],
        **{**read, **fields, "info": info},
    )


def _seconds(span: Any, where: str) -> float | None:
    """Return how long the agent worked, or None if the trace does not say when it began or ended."""
    start, end = field_of(span, "start"), field_of(span, "end")
    both = isinstance(start, int | float) and isinstance(end, int | float)
    return number_of(span, "end", where) - number_of(span, "start", where) if both and 0 < start <= end else None


def _parents(nodes: Sequence[Any], where: str) -> list[int]:
    parents = []
    for i, node in enumerate(nodes):
        parent = field_of(node, "parent")
        parent = -1 if parent is None else parent
        if not isinstance(parent, int) or not -1 <= parent < i:
            raise InvalidInput(f"{where} nodes[{i}].parent: {shown(parent)}; must be an earlier node")
        parents.append(parent)
    return parents


def _type_map(trace: Any, where: str) -> dict[int, int]:
    """Return placeholder token -> 1 image, 2 video. The keys are text on the wire."""
    found = optional_mapping(trace, "mm_token_type_id_map", where)
    try:
        types = {int(token): int(kind) for token, kind in found.items()}
    except (TypeError, ValueError, OverflowError):
        types = {-1: 0}
    if not all(0 <= token < 2**32 and 0 <= kind < 2**8 for token, kind in types.items()):
        raise InvalidInput(f"{where}.mm_token_type_id_map: {found!r:.60}; must map token ids to 1 or 2")
    return types


def _outcome(trace: Any, where: str) -> dict[str, Any]:
    named = optional_mapping(trace, "rewards", where).items()
    rewards = [(r, f"{where}.rewards[{name!r}]") for name, r in named if r is not None]
    stop = str(field_of(trace, "stop_condition") or "")
    finished = [c for c in optional_list(trace, "calls", where) if field_of(c, "error") is None]
    cut = bool(finished) and field_of(finished[-1], "finish_reason") == "length"
    metrics = optional_mapping(trace, "metrics", where)
    outcome: dict[str, Any] = {
        "reward": sum(number_of(r, "score", at) * number_of(r, "weight", at) for r, at in rewards) if rewards else None,
        "stop_condition": stop,
        "truncated": stop in _LIMITS or cut,
        "metrics": {key: value for key, value in metrics.items() if value is not None},
        "seconds": _seconds(field_of(field_of(trace, "timing"), "agent"), f"{where}.timing.agent"),
    }
    return {**outcome, "error": failure_of(trace, where)}


def failure_of(record: Any, where: str = "trace") -> str | None:
    """Return why a trace or an episode failed, or None.

    If its last model call failed, that is the reason: a harness that dies of it reports only its own traceback. An
    episode that is not ok has no failure of its own if only one of its traces failed.
    """
    is_trace = field_of(record, "traces") is None
    if field_of(record, "ok", is_trace):
        return None
    errors, calls = optional_list(record, "errors", where), optional_list(record, "calls", where)
    failed = field_of(calls[-1], "error") if calls else None
    if failed is not None:
        return _message(failed)
    if errors:
        return _message(errors[-1])
    return f"not completed ({field_of(record, 'stop_condition') or 'no stop condition'})" if is_trace else None


_PREFIX = re.compile(r"[^\n]{0,80}? exited -?\d+: |[^\n]{0,80}?\(exit -?\d+\): ")
"""What verifiers puts before the output of a harness that failed."""


def _message(error: Any) -> str:
    """Return an error in one line. Of output that ends in a traceback, the last line says what happened."""
    text = str(field_of(error, "message", "")).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and any("line " in line for line in lines):
        before = _PREFIX.match(text)
        text = f"{before[0] if before else ''}{lines[-1]}"
    return f"{field_of(error, 'type', 'error')}: {text}"[:500]


def _temperatures(trace: Any, where: str) -> dict[int, float | None]:
    """Return the temperature by node, with the agent's own under -1."""
    agent = field_of(trace, "agent")
    default = field_of(field_of(field_of(agent, "config"), "sampling"), "temperature")
    found: dict[int, float | None] = {-1: default}
    for call in optional_list(trace, "calls", where):
        node, own = field_of(call, "node"), field_of(field_of(call, "sampling"), "temperature")
        if isinstance(node, int) and own is not None:
            found[node] = own
    return found


def _without_dangling_attempts(nodes: Sequence[Any], parents: Sequence[int], where: str) -> list[int]:
    """Return the nodes on some path that is trained."""
    links = [optional_list(node, "semantic_parents", f"{where} nodes[{i}]") for i, node in enumerate(nodes)]
    accepted = [field_of(link, "node") for own in links for link in own if field_of(link, "type") == "compaction"]
    # How many children each node has: parents -1 0 0 count to 1 2 0 0 with the roots in front, which [1:] removes.
    children = np.bincount(np.asarray(parents) + 1, minlength=len(nodes) + 1)[1:].tolist()
    dropped: set[int] = set()
    for leaf in [i for i, count in enumerate(children) if count == 0]:
        attempt = any(field_of(link, "type") == "compaction_attempt" for link in links[leaf])
        # Walk up from a compaction attempt that was not continued, and drop every node that only it needed.
        node = leaf if attempt and leaf not in accepted else -1
        while node >= 0 and children[node] == 0:
            dropped.add(node)
            node = parents[node]
            if node >= 0:
                children[node] -= 1
    kept = [i for i in range(len(nodes)) if i not in dropped]
    # If every path was such an attempt, keep everything: a trace without a turn is not a trajectory.
    return kept or list(range(len(nodes)))


def _turn(
    node: Any,
    temperature: float | None,
    types: Mapping[int, int],
    streams: set[str],
    images: ImageLookup | None,
    where: str,
) -> Turn:
    ids = ids_of(node, "token_ids", where)
    sampled = bool(field_of(node, "sampled", False))
    if sampled and len(ids) == 0:
        raise InvalidInput(f"{where}.token_ids: empty for a sampled message; run with a client that records tokens")
    given = _stream(node, "mask", where)
    mask = coerce(COLUMNS["loss_mask"], np.zeros(len(ids), np.bool_) if given is None else given, f"{where}.mask")
    if len(mask) != len(ids):
        raise InvalidInput(f"{where}.mask: {len(mask)} values for {len(ids)} tokens; must be one per token")
    logprobs = _stream(node, "logprobs", where)
    columns: dict[str, Any] = {
        "temperatures": temperature if sampled else None,
        "routed_experts": array_of(field_of(node, "routed_experts"), f"{where}.routed_experts"),
        "advantages": _spread(node, "advantages", mask, where),
        "teacher_logprobs": _spread(node, "reference_logprobs", mask, where),
        "mm_token_type_ids": _types(ids, types),
        "sampling_mask": sampling_mask_of(node, where) if mask.any() else None,
        "weight_versions": _weight_versions(node, mask, where),
        **_loss_weights(node, streams, where),
    }
    return Turn(
        ids,
        sampled=sampled or bool(mask.any()),
        mask=mask,
        # An empty stream, list or array, means that nothing was recorded.
        logprobs=None if isinstance(logprobs, list | tuple | np.ndarray) and not len(logprobs) else logprobs,
        columns=_sampler_topk(node, mask, where),
        images=_images(node, ids, mask, types, images, where),
        role=str(field_of(field_of(node, "message"), "role", "") or ""),
        where=where,
        **columns,
    )


def _stream(record: Any, name: str, where: str) -> Any:
    """Return a stream of numbers: a list, an array, or an array packed for the wire."""
    return numbers_of(field_of(record, name), f"{where}.{name}")


def _weight_versions(node: Any, mask: NDArray[np.bool_], where: str) -> Array | None:
    """Return the version that sampled each token, from spans over the sampled ones; -1 on the others.

    Engines label versions with text. Labels that are not whole numbers say nothing about age and are not read.
    """
    spans = optional_list(node, "weight_versions", where)
    if not spans or not all(str(field_of(span, "version", "")).isdecimal() for span in spans):
        return None
    full = np.full(len(mask), NO_VERSION, np.int32)
    full[mask] = read_versions(spans, int(np.count_nonzero(mask)), where)
    return full


def _sampler_topk(node: Any, mask: NDArray[np.bool_], where: str) -> dict[Column, Ragged]:
    """Return the sampler's top-k per token; empty lists on tokens that were not sampled."""
    given = field_of(node, "top_logprobs")
    if given is None or not mask.any():
        return {}
    where = f"{where}.top_logprobs"
    ids = by_counts(field_of(given, "ids"), field_of(given, "counts"), f"{where}.ids")
    logprobs = coerce(COLUMNS["logprobs"], _stream(given, "logprobs", where), f"{where}.logprobs")
    sampled = np.count_nonzero(mask)
    if len(ids) != sampled or len(logprobs) != len(ids.values):
        raise InvalidInput(
            f"{where}: {len(ids)} counts and {len(logprobs)} logprobs for {sampled} sampled tokens with "
            f"{len(ids.values)} ids; must be one count per sampled token and one logprob per id"
        )
    lengths = np.zeros(len(mask), np.int64)
    lengths[mask] = ids.lengths
    offsets = offsets_of(lengths)
    return dict(zip(SAMPLER_TOPK, (Ragged(ids.values, offsets), Ragged(logprobs, offsets)), strict=True))


def _spread(node: Any, name: str, mask: NDArray[np.bool_], where: str) -> Array | None:
    """Return values recorded for the sampled tokens as one per token; 0.0 elsewhere."""
    values = _stream(node, name, where)
    if values is None or not mask.any():
        return None
    compact = coerce(TURN_COLUMNS["advantages"], values, f"{where}.{name}")
    if compact.shape != (np.count_nonzero(mask),):
        raise InvalidInput(f"{where}.{name}: {compact.size} values for {np.count_nonzero(mask)} sampled tokens")
    full = np.zeros(len(mask), np.float32)
    full[mask] = compact
    return full


def _loss_weights(node: Any, streams: set[str], where: str) -> dict[str, Values]:
    """Read streams named `rl`, `ce`, `ref_kl` (or by column). A node without a stream that others have weighs 0."""
    own = optional_mapping(node, "loss_weights", where)
    weights: dict[str, Values] = {}
    for name in sorted(map(str, streams)):
        column = name if name.endswith("_weights") else f"{name}_weights"
        if column not in TURN_COLUMNS:
            raise InvalidInput(f"{where}.loss_weights: unknown stream {name!r}; known are rl, ce and ref_kl")
        weights[column] = numbers_of(own.get(name, 0.0), f"{where}.loss_weights[{name!r}]")
    return weights


def _types(ids: NDArray[np.uint32], types: Mapping[int, int]) -> NDArray[np.uint8] | None:
    if not types:
        return None
    marks = np.zeros(len(ids), np.uint8)
    for token, kind in types.items():
        marks[ids == token] = kind
    return marks


def _images(
    node: Any,
    ids: NDArray[np.uint32],
    mask: NDArray[np.bool_],
    types: Mapping[int, int],
    lookup: ImageLookup | None,
    where: str,
) -> list[ImageSpan]:
    """Return one span per image of the message, on the node's image tokens in order."""
    marks = np.isin(ids, [token for token, kind in types.items() if kind == 1])
    # A sampled placeholder has no image behind it. Training on it would pair it with the wrong image or none.
    if (marks & mask).any():
        at = int(np.argmax(marks & mask))
        raise InvalidInput(
            f"{where}.token_ids[{at}]: the model sampled the image placeholder {ids[at]}, to which no image belongs; "
            "ban the id at sampling"
        )
    if not marks.any():
        return []
    urls = _image_urls(node)
    if lookup is None:
        raise InvalidInput(f"{where}: {np.count_nonzero(marks)} image tokens; pass `images` to look images up by URL")
    places = np.flatnonzero(marks)
    spans, used = [], 0
    for url in urls:
        span = lookup(url)
        length = span.num_patches // span.merge**2
        if used + length > len(places):
            break
        spans.append(msgspec.structs.replace(span, offset=int(places[used]), length=length))
        used += length
    if used != len(places) or len(spans) != len(urls):
        raise InvalidInput(f"{where}: {len(places)} image tokens, but its {len(urls)} images take another number")
    return spans


def _image_urls(node: Any) -> list[str]:
    content = field_of(field_of(node, "message"), "content")
    parts = content if isinstance(content, list | tuple) else ()
    sources = [field_of(part, "image_url") for part in parts if field_of(part, "type", "") == "image_url"]
    return [str(field_of(source, "url", source)) for source in sources]
