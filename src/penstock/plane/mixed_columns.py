"""Which held groups cannot be in one step with the others: found in one pass, wherever they stand.

What a step needs of its groups is best declared (`requires`) and is then checked when they are put. Where it is not,
groups with and without a column are both accepted, and the fewer ones are set aside before a step is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from penstock.frames import WITH, WITHOUT
from penstock.log import GroupRow


def odd_groups(kinds: Mapping[str, Counter[str]], held: Iterable[GroupRow]) -> dict[int, str]:
    """Groups that are unlike most of the others, by op, with the reason.

    `kinds` counts, by column, what held groups ask of the others in their step. Of each the fewer ones are odd; where
    there are as many of both, those that lack the column."""
    chosen = {
        name: max(counts, key=lambda kind: (counts[kind], kind != WITHOUT, kind))
        for name, counts in kinds.items()
        if len(counts) > 1
    }
    if not chosen:
        return {}
    found: dict[int, str] = {}
    for row in held:
        for name, kind in row.kinds:
            if kind != chosen.get(name, kind):
                found[row.op] = (
                    f"{name}: this group is {_in_words(kind)}, {kinds[name][chosen[name]]} held groups are "
                    f"{_in_words(chosen[name])}; a step takes one kind. Put all groups alike, or declare `requires`"
                )
    return found


def _in_words(kind: str) -> str:
    return {WITH: "with it", WITHOUT: "without it"}.get(kind, f"of {kind}")


def count_kinds(kinds: dict[str, Counter[str]], row: GroupRow, sign: int) -> None:
    """Count what a group asks of the others in its step; a negative sign takes it out."""
    for name, kind in row.kinds:
        counts = kinds.setdefault(name, Counter())
        counts[kind] += sign
        if counts[kind] <= 0:
            del counts[kind]
