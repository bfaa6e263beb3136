"""Read events of Agent Lightning's gateway as trajectories: model requests with token ids, and the last reward.

    {"event_type": "model_request", "rollout_id": "r1", "attempt_id": "0", "data": {"response": {...}, ...}}
    {"event_type": "reward", "rollout_id": "r1", "attempt_id": "0", "data": {"value": 1.0}}

Both forms of a model request are read: the server's recorded response, and the gateway's triplets
(`prompt_token_ids`, `response_token_ids`, `response_log_probs`). As in Agent Lightning, the last attempt counts, the
last reward, and of several requests with the same prompt the last. Requests that failed or have no ids are skipped. A
line may also hold a rollout with its events (`{"rollout": {...}, "events": [...]}`). Rollouts with the same `data_id`
form a group.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from penstock.arrays import Sample
from penstock.capture import (
    Trajectory,
    field_of,
    from_chat_completions,
    list_of,
    located,
    number_of,
    optional_list,
    optional_mapping,
)
from penstock.convert import make_group
from penstock.errors import InvalidInput
from penstock.integrations.formats.file_or_stream import Lost, Place, json_lines

_BAD_STATUS = 400


def from_agent_lightning(
    events: Iterable[Any] | Mapping[str, Iterable[Any]], *, lost: Lost | None = None, **fields: Any
) -> Trajectory:
    """Convert one rollout's events, a list or by attempt as in hooks, to a trajectory. `fields` are `Trajectory`'s.

    >>> answer = {"prompt_token_ids": [1, 2], "choices": [{"token_ids": [3], "finish_reason": "stop"}]}
    >>> events = [
    ...     {"event_type": "model_request", "attempt_id": "0", "data": {"response": answer, "model_version": 4}},
    ...     {"event_type": "reward", "attempt_id": "0", "data": {"value": 0.5}},
    ... ]
    >>> from_agent_lightning(events, id="r1")
    Trajectory(2 turns, 3 tokens, 1 sampled, reward=0.5, id='r1', env='')
    """
    chosen = _last_attempt(events)
    requests: dict[Any, dict[str, Any]] = {}
    reward: float | None = None
    for i, event in enumerate(chosen):
        kind, data = field_of(event, "event_type"), optional_mapping(event, "data", f"events[{i}]")
        if kind == "reward":
            reward = number_of(data, "value", f"events[{i}].data")
        elif kind == "model_request":
            _add(requests, data, f"events[{i}]", lost)
        elif lost is not None:
            lost.unread[f"event {kind}"] += 1
    if not requests:
        raise InvalidInput("events: no model request with token ids; ask the gateway for return_token_ids")
    answers = list(requests.values())
    temperatures = {answer.pop("temperature") for answer in answers}
    return from_chat_completions(
        answers, **{"reward": reward, "temperature": temperatures.pop() if len(temperatures) == 1 else None, **fields}
    )


def _last_attempt(events: Iterable[Any] | Mapping[str, Iterable[Any]], where: str = "events") -> Sequence[Any]:
    if isinstance(events, Mapping):
        names = list(events)
        return list_of(events, names[-1], where) if names else []
    rows = list(events)
    last = field_of(rows[-1], "attempt_id") if rows else None
    return [event for event in rows if field_of(event, "attempt_id") == last]


def _add(requests: dict[Any, dict[str, Any]], data: Mapping[str, Any], where: str, lost: Lost | None) -> None:
    """Add a response under its prompt. A later one with the same prompt replaces the earlier, and moves to the end."""
    answer = _answer(data, where)
    if answer is None:
        if lost is not None:
            lost.unread["model request that failed or has no token ids"] += 1
        return
    key = tuple(answer["prompt_token_ids"])
    requests.pop(key, None)
    requests[key] = answer


def _answer(data: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return a response in the form of inference servers, or None if it cannot be trained."""
    status = data.get("http_status")
    if data.get("status") == "error" or (isinstance(status, int) and status >= _BAD_STATUS):
        return None
    response = data.get("response")
    if isinstance(response, Mapping):
        choices = optional_list(response, "choices", f"{where}.response")
        choice = dict(choices[0]) if choices and isinstance(choices[0], Mapping) else {}
        prompt = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
        ids = choice.get("token_ids")
    else:
        prompt, ids = data.get("prompt_token_ids"), data.get("response_token_ids")
        logprobs = data.get("response_log_probs")
        choice = {"logprobs": None if logprobs is None else {"token_logprobs": logprobs}}
    if not _are_ids(prompt) or not _are_ids(ids):
        return None
    choice |= {"token_ids": ids, "finish_reason": choice.get("finish_reason") or data.get("finish_reason")}
    version = data.get("model_version", field_of(data.get("server"), "version"))
    if version is not None:
        choice["weight_versions"] = [{"version": version, "start": 0, "end": len(ids)}]
    if data.get("routed_experts") is not None:
        choice["routed_experts"] = _experts(data["routed_experts"], f"{where}.routed_experts")
    temperature = field_of(data.get("request"), "temperature")
    given = isinstance(temperature, int | float) and temperature > 0
    return {"prompt_token_ids": prompt, "choices": [choice], "temperature": temperature if given else None}


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _experts(payload: Any, where: str) -> Any:
    """Return the experts' rows. Text is a numpy file in base64."""
    if not isinstance(payload, str):
        return payload
    try:
        return np.load(io.BytesIO(base64.b64decode(payload, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise InvalidInput(f"{where}: {error}; must be a numpy array in base64") from None


# ------------------------------------------------------------------ files


def read_agent_lightning(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of all rollouts, group by group. Events of several rollouts may be interleaved."""
    events: dict[str, list[Any]] = {}
    groups: dict[str, str] = {}
    for where, record in json_lines(place):
        _collect(record, where, events, groups)
    members: dict[str, list[str]] = {}
    for rollout in events:
        members.setdefault(groups.get(rollout) or rollout, []).append(rollout)
    for group, rollouts in members.items():
        found = [t for name in rollouts if (t := _trajectory(events[name], name, place.name, lost)) is not None]
        if found:
            yield from make_group(found, id=group, prompt=group, advantage=None).samples


def _collect(record: dict[str, Any], where: str, events: dict[str, list[Any]], groups: dict[str, str]) -> None:
    rollout = record.get("rollout") if "events" in record else None if "event_type" in record else record
    name = field_of(rollout or record, "rollout_id")
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{where}: no rollout_id; each line is an event, or a rollout with its events")
    own = events.setdefault(name, [])
    if "event_type" in record:
        own.append(record)
    given = record.get("events")
    own += given if isinstance(given, list) else _last_attempt(optional_mapping(record, "events", where), where)
    if rollout is not None:
        task = field_of(rollout, "input")
        groups[name] = str(field_of(task, "data_id") or field_of(task, "instance_id") or "")


def _trajectory(events: list[Any], name: str, where: str, lost: Lost) -> Trajectory | None:
    if not any(field_of(event, "event_type") == "model_request" for event in events):
        lost.unread["rollout without a model request"] += 1
        return None
    with located(f"{where} rollout {name!r}"):
        return from_agent_lightning(events, id=name, lost=lost)
