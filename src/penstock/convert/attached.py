"""Attaching a column that was computed later, by sample id and never by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from penstock.arrays import TOKEN_COLUMNS, Sample, Values
from penstock.errors import Conflict, InvalidInput, UnknownKey


def attach(samples: Iterable[Sample], name: str, values: Mapping[str, Values]) -> list[Sample]:
    """The samples with one more column: teacher logprobs, advantages, weights, ...

    Every sample must have a value and every value a sample; lengths are checked as for any column.

    >>> sample = Sample(id="17/0", token_ids=[1, 2, 3], loss_mask=[0, 1, 1])
    >>> [scored] = attach([sample], "teacher_logprobs", {"17/0": [0.0, -0.5, -0.25]})
    >>> scored["teacher_logprobs"].tolist(), "teacher_logprobs" in sample
    ([0.0, -0.5, -0.25], False)
    """
    rows = list(samples)
    known = {sample.id for sample in rows}
    if name not in TOKEN_COLUMNS or name == "token_ids":
        raise UnknownKey(f"attach: unknown column {name!r}; known are {', '.join(TOKEN_COLUMNS)}")
    if len(known) != len(rows):
        twice = Counter(sample.id for sample in rows).most_common(1)[0][0]
        raise Conflict(f"attach {name}: two samples are named {twice!r}; ids must be unique to attach by them")
    unknown = [key for key in values if key not in known]
    if unknown:
        raise UnknownKey(f"attach {name}: {len(unknown)} ids of no sample, first {unknown[0]!r}; nothing was attached")
    missing = [sample.id for sample in rows if sample.id not in values]
    if missing:
        raise InvalidInput(
            f"attach {name}: no value for {len(missing)} of {len(rows)} samples, first {missing[0]!r}; none attached"
        )
    return [sample.replace(**{name: values[sample.id]}) for sample in rows]
