"""A sample: one flat token sequence with aligned columns, validated when it is built.

Columns may be given as numpy arrays or as lists. They are checked against the column table once, converted once to the
declared dtype, and are read-only arrays from then on. An array that already has the right dtype is not copied: do not
write to it afterwards.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.coercion import Values, check_text, coerce, coerce_columns, is_number
from penstock.arrays.columns import COLUMNS, TEXT_COLUMNS, Array, Cells, Column
from penstock.arrays.counts import check_version, known
from penstock.arrays.images import ImageSpan, check_spans, types_of
from penstock.arrays.own_columns import NO_COLUMNS, Given, Own, read_own, table_with, words_for
from penstock.arrays.ragged import freeze, same_bits
from penstock.arrays.rollout import RolloutInfo, rollout_text
from penstock.errors import InvalidInput, UnknownKey


class TurnColumns(TypedDict, total=False):
    """Keyword arguments of `Turn` for its other columns, so that type checkers find a misspelt one."""

    temperatures: Values | None
    advantages: Values | None
    teacher_logprobs: Values | None
    rl_weights: Values | None
    ce_weights: Values | None
    ref_kl_weights: Values | None
    routed_experts: Values | None
    mm_token_type_ids: Values | None
    weight_versions: Values | None
    sampling_mask: Values | None
    teacher_topk_ids: Values | None
    teacher_topk_logprobs: Values | None


class SampleColumns(TurnColumns, total=False):
    """The same for `Sample`. `columns.py` says what each column is; a test compares the names."""

    logprobs: Values | None
    rewards: Values | None


class Sample:
    """One flat token sequence with aligned columns.

    >>> sample = Sample(id="17/0", token_ids=[5, 6, 7], loss_mask=[0, 1, 1], logprobs=[0, -0.5, -0.25], rewards=1.0)
    >>> sample.num_tokens, sample.loss_tokens, float(sample["rewards"])
    (3, 2, 1.0)

    Columns that Penstock does not know go into `columns`, by name or by the `Column` that declares them:

    >>> Sample(token_ids=[5, 6], columns={"turn_weights": [0.0, 1.5]})["turn_weights"].tolist()
    [0.0, 1.5]
    """

    __slots__ = (
        "_columns",
        "_own",
        "env",
        "group",
        "id",
        "images",
        "mode",
        "policy_version",
        "prompt",
        "rollout",
        "run",
    )

    id: str
    """Unique; generated when not given."""
    group: str
    """The group's own id: the unit of replay."""
    prompt: str
    """The prompt's name, shared by all groups sampled from it."""
    env: str
    run: str
    mode: str
    rollout: str
    """Metrics, outcome and roles of its rollout as JSON, read by `penstock.arrays.read_rollout`; may be empty."""
    policy_version: int | None
    """The oldest version that sampled any of its tokens; None = not known."""
    images: tuple[ImageSpan, ...]
    _columns: dict[str, Cells]
    _own: Own

    def __init__(
        self,
        *,
        token_ids: Values,
        loss_mask: Values | None = None,
        id: str | None = None,  # noqa: A002 - the field's own name
        group: str = "",
        prompt: str = "",
        env: str = "",
        run: str = "",
        mode: str = "rl",
        rollout: str | Mapping[str, Any] | RolloutInfo = "",
        policy_version: int | None = None,
        images: Sequence[ImageSpan] = (),
        columns: Given = NO_COLUMNS,
        **known_columns: Unpack[SampleColumns],
    ) -> None:
        text = {
            "id": uuid.uuid4().hex if id is None else id,
            "group": group,
            "prompt": prompt,
            "env": env,
            "run": run,
            "mode": mode,
            "rollout": rollout if isinstance(rollout, str) else "",
        }
        where = f"sample {text['id']!r:.80}"
        if not isinstance(rollout, str):
            text["rollout"] = rollout_text(rollout, f"{where}.rollout")
        check_text(text, where)
        given: dict[str, Any] = {"token_ids": token_ids, "loss_mask": loss_mask, **known_columns}
        own: Own = NO_COLUMNS
        if columns:
            cells, own = read_own(columns, NO_COLUMNS, where)
            given |= cells
        arrays = coerce_columns(given, where, table_with(own))
        spans = tuple(images)
        check_spans(spans, len(arrays["token_ids"]), arrays.get("mm_token_type_ids"), where)
        if spans and "mm_token_type_ids" not in arrays:
            # Without types, the spans imply them. Coerce again, so that the new column is checked and in table order.
            given["mm_token_type_ids"] = types_of(spans, len(arrays["token_ids"]))
            arrays = coerce_columns(given, where, table_with(own))
        versions = arrays.get("weight_versions")
        if policy_version is None and versions is not None:
            policy_version = known(int(versions.min()))
        self._set(arrays, text, check_version(policy_version, f"{where}.policy_version"), spans, own)

    @classmethod
    def trusted(
        cls,
        columns: dict[str, Cells],
        text: Mapping[str, str],
        policy_version: int | None,
        images: tuple[ImageSpan, ...],
        own: Own = NO_COLUMNS,
    ) -> Sample:
        """Build a sample from validated columns. Nothing is checked or copied; arrays become read-only."""
        sample = cls.__new__(cls)
        for values in columns.values():
            freeze(values)
        sample._set(columns, text, policy_version, images, own)
        return sample

    def _set(
        self,
        columns: dict[str, Cells],
        text: Mapping[str, str],
        policy_version: int | None,
        images: tuple[ImageSpan, ...],
        own: Own,
    ) -> None:
        put = object.__setattr__
        put(self, "_columns", columns)
        put(self, "_own", own)
        for name in TEXT_COLUMNS:
            put(self, name, text[name])
        put(self, "policy_version", policy_version)
        put(self, "images", images)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support `copy` and frameworks that pickle objects between processes."""
        text = {name: getattr(self, name) for name in TEXT_COLUMNS}
        return type(self).trusted, (dict(self._columns), text, self.policy_version, self.images, self._own)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Sample is immutable; use sample.replace({name}=...)")

    @classmethod
    def from_prompt(
        cls,
        *,
        prompt_ids: Values,
        completion_ids: Values,
        completion_mask: Values | None = None,
        completion_logprobs: Values | None = None,
        completion_temperatures: Values | None = None,
        **rest: Any,
    ) -> Sample:
        """Build a sample from a prompt and its completion: the prompt is context, the completion is trained.

        Temperatures are one number or one per completion token. Prompt tokens take the first completion token's.

        >>> s = Sample.from_prompt(prompt_ids=[1, 2], completion_ids=[3, 4], completion_logprobs=[-1.0, -2.0])
        >>> s.loss_mask.tolist(), s["logprobs"].tolist()
        ([False, False, True, True], [0.0, 0.0, -1.0, -2.0])
        """
        where = f"sample {rest.get('id')!r}"
        prompt = coerce(COLUMNS["token_ids"], prompt_ids, f"{where}.prompt_ids")
        completion = coerce(COLUMNS["token_ids"], completion_ids, f"{where}.completion_ids")

        def behind_prompt(name: str, values: Values) -> Array:
            tail = coerce(COLUMNS[name], values, f"{where}.completion_{name}")
            if len(tail) != len(completion):
                raise InvalidInput(f"{where}.completion_{name}: {len(tail)} values for {len(completion)} tokens")
            return np.concatenate([np.zeros(len(prompt), tail.dtype), tail])

        trained = np.ones(len(completion), np.bool_) if completion_mask is None else completion_mask
        if completion_logprobs is not None:
            rest["logprobs"] = behind_prompt("logprobs", completion_logprobs)
        if completion_temperatures is not None:
            rest["temperatures"] = completion_temperatures
            if not is_number(completion_temperatures):
                rest["temperatures"] = behind_prompt("temperatures", completion_temperatures)
                rest["temperatures"][: len(prompt)] = rest["temperatures"][len(prompt) : len(prompt) + 1]
        mask = behind_prompt("loss_mask", trained)
        return cls(token_ids=np.concatenate([prompt, completion]), loss_mask=mask, **rest)

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        ids: NDArray[np.uint32] = self._columns["token_ids"]
        return ids

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = self._columns["loss_mask"]
        return mask

    @property
    def num_tokens(self) -> int:
        return len(self._columns["token_ids"])

    @property
    def loss_tokens(self) -> int:
        return int(np.count_nonzero(self._columns["loss_mask"]))

    @property
    def columns(self) -> Mapping[str, Cells]:
        """The columns present, by name: [T, ...] per token, a `Ragged` with one list per token, or a scalar array."""
        return self._columns

    @property
    def own(self) -> Own:
        """Declarations of the present columns that are not in the table."""
        return self._own

    def __getitem__(self, name: str) -> Cells:
        try:
            return self._columns[name]
        except KeyError:
            raise UnknownKey(f"sample {self.id!r} has no column {name!r}; it has {', '.join(self._columns)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def get(self, name: str) -> Cells | None:
        return self._columns.get(name)

    def replace(self, **changes: Any) -> Sample:
        """Return a validated copy with some columns or fields changed. `None` removes a column.

        Change columns that are not in the table through `columns`; those it does not name stay.
        """
        fields = {name: getattr(self, name) for name in (*TEXT_COLUMNS, "policy_version", "images")}
        changed = {_name(key): (key, values) for key, values in changes.pop("columns", {}).items()}
        own: dict[Any, Any] = {c: self._columns[name] for name, c in self._own.items() if name not in changed}
        own |= {self._own.get(key, key): values for key, values in changed.values()}
        known = {name: values for name, values in self._columns.items() if name not in self._own}
        return Sample(**{**fields, **known, **changes}, columns=own)

    def conformed(self, declared: Own) -> Sample:
        """Return the sample with its own columns as declared. Raises InvalidInput for an undeclared column."""
        if all(column is declared.get(name) for name, column in self._own.items()):
            return self
        unknown = self._own.keys() - declared.keys()
        if unknown:
            name = sorted(unknown)[0]
            raise InvalidInput(
                f"sample {self.id!r}: column {name!r} ({words_for(self._own[name])}) was not declared; pass "
                f"columns=[penstock.Column({name!r}, ...)] where the plane is opened or pack is called"
            )
        return self.replace(columns={declared[name]: self._columns[name] for name in self._own})

    def __eq__(self, other: object) -> bool:
        """Compare fields and columns, floats bit for bit (so NaN equals the same NaN)."""
        if not isinstance(other, Sample):
            return NotImplemented
        fields = (*TEXT_COLUMNS, "policy_version", "images")
        return (
            all(getattr(self, name) == getattr(other, name) for name in fields)
            and self._columns.keys() == other._columns.keys()
            and all(same_bits(values, other._columns[name]) for name, values in self._columns.items())
        )

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        extra = [name for name in self._columns if name not in ("token_ids", "loss_mask")]
        return f"Sample(id={self.id!r}, tokens={self.num_tokens}, loss_tokens={self.loss_tokens}, columns={extra})"


def _name(key: str | Column) -> str:
    return key.name if isinstance(key, Column) else key
