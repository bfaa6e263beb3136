"""Read responses of inference servers: chat completions, completions and token-in/token-out generation.

One response is one step. What is read of it, wherever the server puts it:

    prompt ids       `prompt_token_ids` of the response or of the choice, else given by the caller
    completion ids   `token_ids` of the choice, else the ids in `logprobs.content`
    logprobs         `logprobs.content[i].logprob`, with `"token": "token_id:N"` or `"token_id": N` beside it, checked
                     against the ids; or `logprobs.token_logprobs`
    kept ids         `sampling_mask` of the choice: the ids each token was drawn from, in any shape of
                     `penstock.capture.server_columns`; log-probabilities must then be those over these ids
    weight versions  `weight_versions: [{version, start, end}]` over the completion, where the weights changed while
                     it was sampled

A server marks a log-probability it does not have with -9999. Such a response is rejected, as is one whose counts
differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import COLUMNS, Values, coerce
from penstock.capture.fold import Step, fold
from penstock.capture.records import ABSENT, field_of, ids_of, list_of, optional_list
from penstock.capture.server_columns import read_routing, sampling_mask_of
from penstock.capture.trajectory import Trajectory
from penstock.errors import InvalidInput, shown

SENTINEL = -9999.0
_PREFIX = "token_id:"


def from_chat_completions(
    responses: Iterable[Any],
    *,
    prompts: Sequence[Values] | None = None,
    temperature: float | None = None,
    **fields: Any,
) -> Trajectory:
    """Return the trajectory of a conversation's responses, in order. `fields` are those of `Trajectory`.

    `prompts` gives the prompt ids of each response for servers that do not return them.

    >>> t = from_chat_completions([{
    ...     "prompt_token_ids": [1, 2],
    ...     "choices": [{"token_ids": [3], "finish_reason": "stop",
    ...                  "logprobs": {"content": [{"token": "token_id:3", "logprob": -0.5}]}}],
    ... }])
    >>> t.turns[1].token_ids.tolist(), t.turns[1].logprobs.tolist(), t.stop_condition
    ([3], [-0.5], 'stop')
    """
    answers = list(responses)
    if prompts is not None and len(prompts) != len(answers):
        raise InvalidInput(f"prompts: {len(prompts)} for {len(answers)} responses; give one per response")
    name = f"trajectory {fields['id']!r}" if fields.get("id") else "trajectory"
    finish = _finish(answers, name)
    return fold(
        _steps(answers, prompts, temperature, name),
        **{"stop_condition": finish, "truncated": finish == "length", **fields},
    )


def from_choices(
    response: Any,
    *,
    rewards: Sequence[float] | None = None,
    prompt: Values | None = None,
    temperature: float | None = None,
    **fields: Any,
) -> list[Trajectory]:
    """Return one trajectory per choice of a response to a request with `n` above 1: the rollouts of a group.

    `rewards` has one number per choice, in order. `prompt` is for servers that do not return its ids. `fields` are
    those of `Trajectory`, the same for all.

    >>> reply = {"prompt_token_ids": [1, 2], "choices": [
    ...     {"token_ids": [3], "logprobs": {"token_logprobs": [-0.5]}},
    ...     {"token_ids": [4, 5], "logprobs": {"token_logprobs": [-1.0, -0.25]}}]}
    >>> [(t.turns[-1].token_ids.tolist(), t.reward) for t in from_choices(reply, rewards=[1.0, 0.0])]
    [([3], 1.0), ([4, 5], 0.0)]
    """
    choices = list_of(response, "choices", "response")
    given: Any = rewards
    if given is not None and (not hasattr(given, "__len__") or isinstance(given, str)):
        raise InvalidInput(f"rewards: {given!r:.60}; give a list with one number per choice")
    if rewards is not None and len(rewards) != len(choices):
        raise InvalidInput(f"rewards: {len(rewards)} for {len(choices)} choices; give one per choice")
    shared = {name: field_of(response, name) for name in ("prompt_token_ids", "weight_versions")}
    return [
        from_chat_completions(
            [{**shared, "choices": [choice]}],
            prompts=None if prompt is None else [prompt],
            temperature=temperature,
            **({} if rewards is None else {"reward": rewards[i]}),
            **fields,
        )
        for i, choice in enumerate(choices)
    ]


def _steps(
    answers: list[Any], prompts: Sequence[Values] | None, temperature: float | None, name: str
) -> Iterator[Step]:
    for i, answer in enumerate(answers):
        where = f"{name} responses[{i}]"
        choice = _choice(answer, where)
        at = f"{where}.choices[0]"
        content = _content(choice, at)
        completion = _completion_ids(choice, content, at)
        columns: dict[str, Values] = {}
        versions = _versions(answer, choice, len(completion), where)
        if versions is not None:
            columns["weight_versions"] = versions
        if temperature is not None:
            columns["temperatures"] = temperature
        kept = sampling_mask_of(choice, at)
        if kept is not None:
            columns["sampling_mask"] = kept
        yield Step(
            where=at,
            prompt_ids=_prompt_ids(answer, choice, None if prompts is None else prompts[i], where),
            completion_ids=completion,
            logprobs=_logprobs(choice, content, completion, at),
            columns=columns,
            routing=read_routing(field_of(choice, "routed_experts"), f"{at}.routed_experts"),
        )


def _choice(answer: Any, where: str) -> Any:
    choices = list_of(answer, "choices", where)
    if len(choices) != 1:
        raise InvalidInput(
            f"{where}.choices: {len(choices)}; a trajectory follows one; `from_choices` makes one of each"
        )
    return choices[0]


def _finish(answers: list[Any], name: str) -> str:
    if not answers:
        return ""
    choice = _choice(answers[-1], f"{name} responses[{len(answers) - 1}]")
    return str(field_of(choice, "finish_reason") or "")


def _prompt_ids(answer: Any, choice: Any, given: Values | None, where: str) -> NDArray[np.uint32]:
    for record in (answer, choice):
        if field_of(record, "prompt_token_ids") is not None:
            return ids_of(record, "prompt_token_ids", where)
    if given is None:
        ask = "ask the server for token ids (vLLM: return_token_ids=True)"
        raise InvalidInput(f"{where}.prompt_token_ids: missing; {ask}, or pass `prompts`")
    return coerce(COLUMNS["token_ids"], given, f"{where}.prompt_token_ids")


def _content(choice: Any, where: str) -> Sequence[Any] | None:
    """Return the per-token records of `logprobs.content`, if the server sent any."""
    logprobs = field_of(choice, "logprobs")
    if logprobs is None or field_of(logprobs, "content") is None:
        return None
    return list_of(logprobs, "content", f"{where}.logprobs")


def _completion_ids(choice: Any, content: Sequence[Any] | None, where: str) -> NDArray[np.uint32]:
    if field_of(choice, "token_ids") is not None:
        return ids_of(choice, "token_ids", where)
    named = [_token_id(entry, f"{where}.logprobs.content[{i}]") for i, entry in enumerate(content or ())]
    if not named or None in named:
        raise InvalidInput(f"{where}.token_ids: missing; ask the server for token ids (vLLM: return_token_ids=True)")
    return coerce(COLUMNS["token_ids"], [n for n in named if n is not None], f"{where}.token_ids")


def _token_id(entry: Any, where: str) -> int | None:
    """Return the id a log-probability is for, or None when the server sent text only."""
    number = field_of(entry, "token_id")
    if number is None:
        token = field_of(entry, "token")
        if not isinstance(token, str) or not token.startswith(_PREFIX):
            return None
        digits = token[len(_PREFIX) :]
        number = int(digits) if digits.isascii() and digits.isdecimal() else digits
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidInput(f"{where}.token_id: {number!r}; must be a whole number")
    return number


def _logprobs(
    choice: Any, content: Sequence[Any] | None, completion: NDArray[np.uint32], where: str
) -> NDArray[np.float32] | None:
    record = field_of(choice, "logprobs")
    if record is None:
        return None
    at = f"{where}.logprobs"
    if content is None:
        values = coerce(COLUMNS["logprobs"], list_of(record, "token_logprobs", at), f"{at}.token_logprobs")
    else:
        # With equal counts, a mismatch of ids means another tokenization. With different counts the error below says
        # more.
        if len(content) == len(completion):
            _check_ids(content, completion, at)
        raw = [field_of(entry, "logprob", ABSENT) for entry in content]
        bad = next((i for i, value in enumerate(raw) if not isinstance(value, int | float)), None)
        if bad is not None:
            raise InvalidInput(f"{at}.content[{bad}].logprob: {raw[bad]!r}; must be a number")
        values = coerce(COLUMNS["logprobs"], raw, f"{at}.content")
    if len(values) != len(completion):
        raise InvalidInput(f"{at}: {len(values)} values for {len(completion)} completion tokens; must be one per token")
    # As a log-probability it would be a valid, absurdly small number: exp(-9999) is 0, and the ratio overflows.
    sentinel = np.flatnonzero(values == np.float32(SENTINEL))
    if len(sentinel):
        raise InvalidInput(
            f"{at}[{sentinel[0]}]: {SENTINEL:g}, the server's mark for a log-probability it does not have"
        )
    return values


def _check_ids(content: Sequence[Any], completion: NDArray[np.uint32], where: str) -> None:
    for i, (entry, token) in enumerate(zip(content, completion.tolist(), strict=True)):
        named = _token_id(entry, f"{where}.content[{i}]")
        if named is not None and named != token:
            raise InvalidInput(f"{where}.content[{i}].token_id: {named}, but the completion has {token} there")


def _versions(answer: Any, choice: Any, count: int, where: str) -> NDArray[np.int32] | None:
    spans = optional_list(choice, "weight_versions", where) or optional_list(answer, "weight_versions", where)
    return read_versions(spans, count, where) if spans else None


def read_versions(spans: Sequence[Any], count: int, where: str) -> NDArray[np.int32]:
    """Return [completion], the version that sampled each token, from spans that must cover it end to end."""
    versions = np.zeros(count, np.int32)
    end = 0
    for i, span in enumerate(spans):
        at = f"{where}.weight_versions[{i}]"
        start, stop = field_of(span, "start", ABSENT), field_of(span, "end", ABSENT)
        if start != end or isinstance(start, bool) or not isinstance(stop, int) or not end <= stop <= count:
            raise InvalidInput(f"{at}: tokens {shown(start)} to {shown(stop)} of {count}; must continue at {end}")
        versions[start:stop] = _version(field_of(span, "version", ABSENT), at)
        end = stop
    if end != count:
        raise InvalidInput(f"{where}.weight_versions: cover {end} of {count} completion tokens; must cover all")
    return versions


def _version(version: Any, where: str) -> int:
    digits = isinstance(version, str) and version.isascii() and version.isdecimal()
    number = int(version.lstrip("0")[:11] or 0) if digits else version  # Python converts at most 4,300 digits
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
        raise InvalidInput(f"{where}.version: {shown(version)}; must be a whole number from 0 up")
    return number
