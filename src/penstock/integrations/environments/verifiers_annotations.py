"""Write the trainer's values for every token back to the messages of verifiers traces.

    node.trainer_logprobs    the trainer's log-probabilities of the sampled tokens, beside the sampler's `logprobs`
    node.entropies           entropies of the trainer's policy
    node.advantages          advantages as trained
    node.loss_weights["rl"]  1.0 on trained tokens, 0.0 on tokens that were not trained or that the loss masked

The values come from a token export (`penstock.view.TokenExporter`, `export_every` of a run). A trace's `info` holds the
id of its samples, and a sample's tokens are those of one path through the trace's messages.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.atomic import replacing
from penstock.capture import field_of
from penstock.errors import InvalidInput
from penstock.integrations.environments.verifiers_rollouts import SAMPLE, TRACES_FILE
from penstock.integrations.formats.shared import Place, json_lines
from penstock.view import Record

_BRANCH = re.compile(r"(.*/\d+)(?:\.\d+)?")
"""Matches a sample's id: group/rollout for the first branch (p#1/3), then group/rollout.branch (p#1/3.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The exported values of one trained sample; all arrays are [T]."""

    token_ids: NDArray[Any]
    loss_mask: NDArray[np.bool_]
    values: dict[str, NDArray[Any]]
    """By field of the trace's node."""
    kept: NDArray[np.bool_]
    """Trained and not masked by the loss."""


@dataclass(slots=True)
class Annotated:
    traces: int = 0
    """Traces with at least one annotated message."""
    tokens: int = 0
    untrained: int = 0
    """Traces that no exported step trained."""


Index = Mapping[str, Sequence[Trained]]


def index_records(records: Iterable[Record]) -> Index:
    """Index an export's samples by rollout. If a sample was trained several times, the last time counts."""
    latest: dict[str, Trained] = {}
    for record in records:
        name = record.fields.get("sample_id")
        if name:
            latest[name] = _trained(record)
    found: dict[str, list[Trained]] = defaultdict(list)
    for name, trained in latest.items():
        match = _BRANCH.fullmatch(name)
        if match:
            found[match[1]].append(trained)
    return found


def _trained(record: Record) -> Trained:
    columns, mask = record.columns, record.loss_mask
    masked = columns.get("is_masked", np.zeros(len(mask), np.bool_))
    names = {"trainer_logprobs": "trainer_logprobs", "entropies": "entropy", "advantages": "advantages"}
    return Trained(
        token_ids=columns["token_ids"],
        loss_mask=mask,
        values={field: columns[name] for field, name in names.items() if name in columns},
        kept=mask & ~masked,
    )


def annotate_trace(trace: Any, index: Index) -> int:
    """Annotate one trace, an object or a dict. Returns the number of sampled tokens that got values."""
    name, tokens = str((field_of(trace, "info") or {}).get(SAMPLE)), 0
    # Fewest trained tokens first: if two samples trained the same message, the one that trained more writes last.
    for trained in sorted(index.get(name, ()), key=lambda one: int(one.loss_mask.sum())):
        tokens += _annotate_path(_path_of(trace, trained, name), trained)
    return tokens


def _path_of(trace: Any, trained: Trained, name: str) -> list[Any]:
    """Find the path of messages, from the root, that begins with the sample's tokens. A sample may be truncated."""
    nodes = field_of(trace, "nodes")
    parents = {field_of(node, "parent") for node in nodes}
    for leaf in [i for i in range(len(nodes)) if i not in parents]:
        path: list[Any] = []
        at: int | None = leaf
        while at is not None:
            path.insert(0, nodes[at])
            at = field_of(nodes[at], "parent")
        ids = np.concatenate([np.asarray(field_of(node, "token_ids"), np.int64) for node in path])
        if len(ids) >= len(trained.token_ids) and np.array_equal(ids[: len(trained.token_ids)], trained.token_ids):
            return path
    raise InvalidInput(f"sample {name!r}: no path of its trace has its tokens; give the traces of the same run")


def _annotate_path(path: Sequence[Any], trained: Trained) -> int:
    start = tokens = 0
    for node in path:
        mask = np.asarray(field_of(node, "mask"), np.bool_)
        here = slice(start, start + len(mask))
        start += len(mask)
        own = trained.loss_mask[here]
        # A message on two paths is trained on one of them only. Keep the values of that path: the loss saw those.
        known = field_of(node, "trainer_logprobs") is not None
        if not mask.any() or start > len(trained.token_ids) or (known and not own.any()):
            continue
        for field, values in trained.values.items():
            _set(node, field, values[here][mask].astype(float).tolist())
        weights = dict(field_of(node, "loss_weights") or {})
        _set(node, "loss_weights", {**weights, "rl": trained.kept[here].astype(float).tolist()})
        tokens += int(mask.sum())
    return tokens


def _set(node: Any, name: str, value: Any) -> None:
    if isinstance(node, dict):
        node[name] = value
    else:
        setattr(node, name, value)


def annotate_file(traces: Path, records: Iterable[Record], out: Path) -> Annotated:
    """Annotate the traces of a folder or file. `out` is replaced atomically and may be the same file."""
    source = traces / TRACES_FILE if traces.is_dir() else traces
    if not source.is_file():
        raise InvalidInput(
            f"{traces}: no {TRACES_FILE}; write one with `penstock rollouts verifiers ENV --traces FOLDER`"
        )
    index, found = index_records(records), Annotated()
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as file:
        for _, episode in json_lines(Place(str(source)), nan=True):
            for trace in episode.get("traces", ()):
                tokens = annotate_trace(trace, index)
                found.traces += tokens > 0
                found.untrained += tokens == 0
                found.tokens += tokens
            file.write(json.dumps(episode).encode() + b"\n")
    return found
