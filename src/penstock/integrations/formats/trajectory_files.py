"""Read files of trajectories: ATIF, Agent Lightning's events, verifiers' traces.

ATIF, version 1.3 and later, is the format of harbor's agents and of NeMo-Gym's export:

    {"schema_version": "ATIF-v1.7", "trajectory_id": "t1", "agent": {"name": "terminus", ...}, "steps": [
        {"step_id": 2, "source": "agent", "metrics": {
            "prompt_token_ids": [...], "completion_token_ids": [...], "logprobs": [...]}, ...}, ...]}

Each step of an agent that has token ids is one model call, with the complete prompt it saw. Steps copied from another
trajectory (`is_copied_context`) are trained there and left out here. Text alone is not enough: a step without token
ids is counted. A file holds one trajectory, as harbor and NeMo-Gym write it, or one per line. Embedded subagents become
trajectories of their own. ATIF has no reward. It is read from `extra.reward`, or from harbor's `verifier/reward.txt`
beside the `agent` folder of the file. NeMo-Gym's task index makes the groups.

Agent Lightning's gateway writes events: model requests with token ids, and the last reward.

    {"event_type": "model_request", "rollout_id": "r1", "attempt_id": "0", "data": {"response": {...}, ...}}
    {"event_type": "reward", "rollout_id": "r1", "attempt_id": "0", "data": {"value": 1.0}}

Both forms of a model request are read: the server's recorded response, and the gateway's triplets
(`prompt_token_ids`, `response_token_ids`, `response_log_probs`). As in Agent Lightning, the last attempt counts, the
last reward, and of several requests with the same prompt the last. Requests that failed or have no ids are skipped. A
line may also hold a rollout with its events (`{"rollout": {...}, "events": [...]}`). Rollouts with the same `data_id`
form a group.

verifiers' `traces.jsonl` has one episode per line, also as `penstock rollouts verifiers --traces` writes them. Samples
have the names and groups under which Penstock put them. Those of other programs are grouped by the episode's group, or
else by its task. Traces of agents that are not trained, without a message, or dropped by the environment are counted.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from penstock.arrays import Sample
from penstock.capture import (
    Trajectory,
    field_of,
    from_chat_completions,
    from_steps,
    from_verifiers,
    is_silent,
    list_of,
    located,
    number_of,
    optional_list,
    optional_mapping,
)
from penstock.convert import make_group, to_samples
from penstock.errors import InvalidInput
from penstock.integrations.formats.shared import MAX_LINE_BYTES, Lost, Place, json_lines, json_object

# ------------------------------------------------------------------ ATIF


ATIF_MARK = b'"ATIF-v'
_IDS = ("prompt_token_ids", "completion_token_ids")


def from_atif(record: Any, *, lost: Lost | None = None, **fields: Any) -> list[Trajectory]:
    """Convert an ATIF trajectory and its embedded subagents. `fields` are those of `Trajectory`, of the first one.

    >>> metrics = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5]}
    >>> steps = [{"step_id": 1, "source": "agent", "message": "3", "metrics": metrics}]
    >>> from_atif({"schema_version": "ATIF-v1.7", "trajectory_id": "t", "agent": {"name": "a"}, "steps": steps})
    [Trajectory(2 turns, 3 tokens, 1 sampled, reward=None, id='t', env='')]
    """
    lost = Lost() if lost is None else lost
    name = str(field_of(record, "trajectory_id") or field_of(record, "session_id") or "")
    where = f"trajectory {name!r}"
    if not str(field_of(record, "schema_version", "")).startswith("ATIF-v1."):
        raise InvalidInput(f"{where}.schema_version: {field_of(record, 'schema_version')!r:.40}; must be ATIF-v1.N")
    calls = [call for step in list_of(record, "steps", where) if (call := _call(step, lost))]
    extra = optional_mapping(record, "extra", where)
    reward = None if extra.get("reward") is None else number_of(extra, "reward", f"{where}.extra")
    agent = str(field_of(field_of(record, "agent"), "name", "") or "")
    if field_of(record, "continued_trajectory_ref"):
        lost.unread["continued_trajectory_ref"] += 1
    own = [from_steps(calls, **{"id": name, "agent": agent, "reward": reward, **fields})] if calls else []
    lost.unread.update([] if calls else ["trajectory without token ids"])
    for child in optional_list(record, "subagent_trajectories", where):
        own += from_atif(child, lost=lost)
    return own


def _call(step: Any, lost: Lost) -> dict[str, Any] | None:
    """Return a step as the model call that `from_steps` reads. None if it is not a model call, or has no ids."""
    if field_of(step, "source") != "agent" or field_of(step, "llm_call_count") == 0:
        return None
    metrics = field_of(step, "metrics")
    several = isinstance(count := field_of(step, "llm_call_count"), int) and count > 1
    reasons = {
        "copied step": field_of(step, "is_copied_context"),
        "agent step without token ids": not all(field_of(metrics, name) for name in _IDS),
        "agent step of several model calls": several,
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    if reason is not None:
        lost.unread[reason] += 1
        return None
    prompt, completion = (field_of(metrics, name) for name in _IDS)
    return {"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": field_of(metrics, "logprobs")}


def read_atif(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of a file with one trajectory, or with one per line."""
    found = False
    for where, record in _records(place):
        extra = optional_mapping(record, "extra", where)
        task = field_of(field_of(extra.get("nemo_gym"), "source"), "task_index")
        fields = {} if extra.get("reward") is not None else _harbor_reward(place)
        with located(where):
            rollouts = from_atif(record, lost=lost, **fields)
        for i, rollout in enumerate(rollouts):
            name = rollout.id or f"{place.short}:{i}"
            group = name if task is None else f"{record.get('session_id') or place.short}:{task}"
            found = True
            yield from to_samples(rollout, group=group, prompt=group, id=name)
    if not found:
        raise InvalidInput(f"{place.name}: no step has token ids; record prompt_token_ids and completion_token_ids")


def _records(place: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    if not place.is_stream:
        with place.reading() as file:
            if ATIF_MARK not in file.readline(MAX_LINE_BYTES):  # one object over several lines
                file.seek(0)
                yield place.name, json_object(file.read(MAX_LINE_BYTES), place.name)
                return
    yield from json_lines(place)


def _harbor_reward(place: Place) -> Mapping[str, Any]:
    """Return the reward of harbor's trial: trial/agent/trajectory.json lies beside trial/verifier/reward.txt."""
    path = Path() if place.is_stream else place.path.parent.parent / "verifier" / "reward.txt"
    if place.is_stream or place.path.parent.name != "agent" or not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8").strip()
    try:
        return {"reward": float(text)}
    except ValueError:
        raise InvalidInput(f"{path}: {text[:40]!r}; must be a number") from None


# ------------------------------------------------------------------ Agent Lightning


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
        return np.lib.format.read_array(io.BytesIO(base64.b64decode(payload, validate=True)), allow_pickle=False)
    except Exception as error:  # noqa: BLE001 - numpy parses the header as Python, and raises what that raises
        raise InvalidInput(f"{where}: {error!s:.200}; must be a numpy array in base64") from None


# ------------------------------------------------------------------ files of events


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


# ------------------------------------------------------------------ verifiers


SAMPLE = "penstock_sample"
"""Key in a trace's `info`: the prefix of its samples' ids."""


def read_traces(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of all traces that are trained, in the order of the file."""
    for where, episode in json_lines(place):
        with located(where):
            for trace in [episode] if "nodes" in episode else optional_list(episode, "traces", "episode"):
                yield from _samples(episode, trace, lost)


def _samples(episode: dict[str, Any], trace: Any, lost: Lost) -> list[Sample]:
    agent = field_of(trace, "agent")
    reasons = {
        "trace of an agent that is not trained": not field_of(agent, "trainable", True),
        "trace dropped by the environment": field_of(trace, "dropped") is not None,
        "trace without a message": is_silent(trace),
    }
    reason = next((name for name, holds in reasons.items() if holds), None)
    if reason is not None:
        lost.unread[reason] += 1
        return []
    (rollout,) = from_verifiers({**episode, "traces": [trace]} if trace is not episode else trace)
    put = field_of(field_of(trace, "info"), SAMPLE)
    task = field_of(episode, "task")
    names = [field_of(field_of(task, "data"), key) for key in ("name", "id", "idx")]
    prompt = str(next((name for name in (*names, field_of(task, "key")) if name is not None), ""))
    group = str(put).rpartition("/")[0] if put else str(rollout.info.get("group") or prompt)
    group = group if put or not rollout.agent else f"{group}/{rollout.agent}"
    return to_samples(rollout, group=group, prompt=prompt, id=str(put or rollout.id))
