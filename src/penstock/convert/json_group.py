"""A group as JSON, for producers without Python, read into the trajectories that a Python producer would add.

    {"prompt": "17", "rollouts": [{"reward": 1.0, "turns": [{"token_ids": [5, 6]},
                                                            {"token_ids": [7], "logprobs": [-0.5]}]}, ...]}

Fields are named and mean what they do in `Trajectory` and `Turn`; docs/integrations/http.md lists them. An unknown
field is an error. Errors name the place: `rollouts[3].turns[1].token_ids[0]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.arrays import MAX_GROUP_SAMPLES, NO_COLUMNS, Own
from penstock.capture import TURN_COLUMNS, Trajectory, Turn, located
from penstock.convert.groups import Group, make_group, unique_id
from penstock.errors import InvalidInput

Record = dict[str, Any]
MAX_TURNS = 1 << 18
"""In a group. An empty turn is 16 bytes of JSON and took 78 us at load 11."""


class JsonTurn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tokens that one message added to the context."""

    token_ids: list[int]
    logprobs: Annotated[
        list[float] | None, Meta(description="of the sampled tokens, or of all; a turn that has them was sampled")
    ] = None
    sampled: Annotated[bool | None, Meta(description="for a sampled turn without log-probabilities")] = None
    mask: Annotated[
        list[bool | int] | None, Meta(description="which tokens the model sampled; by default all of a sampled turn")
    ] = None
    role: str = ""
    columns: Annotated[
        Record,
        Meta(description="other columns by name, as one value per token or one number: temperatures, weight_versions"),
    ] = {}


class JsonRollout(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One rollout: its turns and its outcome."""

    turns: list[JsonTurn]
    parents: Annotated[
        list[int] | None, Meta(description="the turn that each one continues, -1 for none; by default the previous one")
    ] = None
    keeps: Annotated[
        list[int | None] | None, Meta(description="how many of its parent's tokens each turn continues from; null: all")
    ] = None
    reward: Annotated[float | None, Meta(description="null: not scored")] = None
    id: str = ""
    env: str = ""
    run: str = ""
    mode: str = "rl"
    agent: str = ""
    policy_version: int | None = None
    error: Annotated[str | None, Meta(description="why it failed; its tokens are kept and train nothing")] = None
    truncated: bool = False
    stop_condition: str = ""
    seconds: Annotated[float | None, Meta(description="how long it took")] = None
    metrics: Annotated[dict[str, float | None], Meta(description="at most 4,096 bytes")] = {}
    info: Annotated[Record, Meta(description="at most 4,096 bytes")] = {}


class _SealedRollout(JsonRollout, kw_only=True, forbid_unknown_fields=True):
    """The same, with turns not parsed yet: they are counted first."""

    turns: list[msgspec.Raw]  # type: ignore[assignment]


class _Head(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    prompt: Annotated[str, Meta(description="the prompt's name, which comes back as often as it is sampled")]
    id: Annotated[
        str | None, Meta(description="the group's own; give it, so that a group sent twice is recognised")
    ] = None
    policy_version: Annotated[int | None, Meta(description="of every rollout that does not say its own")] = None
    advantage: Annotated[
        Literal["grpo", "grpo_std", "leave_one_out", "max_rl", "raw_rewards"] | None,
        Meta(description="how rewards become advantages; null: the turns have a column advantages, or need none"),
    ] = "grpo"
    evaluation: Annotated[bool, Meta(description="recorded and shown, never trained")] = False


class JsonGroup(_Head, kw_only=True, forbid_unknown_fields=True):
    """The rollouts of one prompt."""

    rollouts: Annotated[list[JsonRollout], Meta(min_length=1, max_length=MAX_GROUP_SAMPLES)]


class _Sealed(_Head, kw_only=True, forbid_unknown_fields=True):
    """The same, with rollouts not parsed yet: each is parsed separately, so that other threads run in between."""

    rollouts: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_GROUP_SAMPLES)]


_HEADS, _ROLLOUTS = msgspec.json.Decoder(_Sealed), msgspec.json.Decoder(_SealedRollout)
_TURNS = msgspec.json.Decoder(JsonTurn)


def read_json_group(text: bytes, columns: Callable[[], Own] = lambda: NO_COLUMNS) -> tuple[Group, bool]:
    """Return the group, and whether it is for evaluation. `columns` returns the plane's declared columns; called if
    needed.

    >>> group, evaluation = read_json_group(b'{"prompt": "17", "id": "17#a", "advantage": null, "rollouts": '
    ...                                     b'[{"turns": [{"token_ids": [5]}, {"token_ids": [6], "sampled": true}]}]}')
    >>> group.id, len(group), evaluation
    ('17#a', 1, False)
    """
    head = _decode(_HEADS, text, "")
    read = [_decode(_ROLLOUTS, rollout, f"rollouts[{i}]") for i, rollout in enumerate(head.rollouts)]
    if (turns := sum(len(rollout.turns) for rollout in read)) > MAX_TURNS:
        raise InvalidInput(f"rollouts: {turns} turns; at most {MAX_TURNS} in a group, send smaller groups or a frame")
    rollouts = [_trajectory(rollout, f"rollouts[{i}]") for i, rollout in enumerate(read)]
    del read
    name = unique_id(head.prompt) if head.id is None else head.id
    rule = None if head.evaluation else head.advantage
    own = columns() if any(turn.own for rollout in rollouts for turn in rollout.turns) else NO_COLUMNS
    group = make_group(
        rollouts,
        id=name,
        prompt=head.prompt,
        policy_version=head.policy_version,
        advantage=rule,
        columns=own,
    )
    return group, head.evaluation


def _decode(decoder: msgspec.json.Decoder[Any], text: bytes | msgspec.Raw, where: str) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        place = f"{where}{path.rstrip('`')}".lstrip(".") or "group"
        raise InvalidInput(f"{place}: {_plain(what)}") from None
    except RecursionError:
        raise InvalidInput(f"{where or 'group'}: lists or objects inside one another too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{where or 'group'}: not JSON: {error}") from None


def _plain(what: str) -> str:
    """Rephrase msgspec's error messages.

    >>> _plain("Expected `int`, got `str`"), _plain("Object contains unknown field `rewrad`")
    ('str; must be int', "unknown field 'rewrad'")
    """
    expected = re.fullmatch(r"Expected `(.+)`, got `(.+)`", what)
    if expected:
        return f"{expected[2]}; must be {expected[1].replace('|', 'or')}"
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", what)
    return f"unknown field {unknown[1]!r}" if unknown else what[0].lower() + what[1:].replace("`", "'")


def _trajectory(rollout: _SealedRollout, where: str) -> Trajectory:
    places = [f"{where}.turns[{i}]" for i in range(len(rollout.turns))]
    turns = [_turn(_decode(_TURNS, turn, at), at) for turn, at in zip(rollout.turns, places, strict=True)]
    fields = {name: getattr(rollout, name) for name in rollout.__struct_fields__ if name != "turns"}
    with located(where):
        return Trajectory(turns=turns, **fields)


def _turn(turn: JsonTurn, where: str) -> Turn:
    known = {name: values for name, values in turn.columns.items() if name in TURN_COLUMNS}
    own = {name: values for name, values in turn.columns.items() if name not in TURN_COLUMNS}
    return Turn(
        turn.token_ids,
        logprobs=turn.logprobs,
        sampled=turn.sampled,
        mask=turn.mask,
        role=turn.role,
        where=where,
        columns=own,
        **known,
    )
