"""Which groups may be in one step: those that have the same columns, in the same shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from penstock.frames import WITH, WITHOUT
from penstock.log import GroupRow


def odd_groups(kinds: Mapping[str, Counter[str]], held: Iterable[GroupRow]) -> dict[int, str]:
    """Return the held groups that cannot be in a step with the majority, by op, with the reason.

    What a step needs from its groups is best declared (`requires`) and then checked when they are put. Where it is not,
    groups with and without a column are both accepted, and the minority is quarantined before a step is drawn: with 30
    groups with `logprobs` and 2 without, those 2 are odd. On a tie, the groups without the column are. `kinds` counts
    held groups by column and kind."""
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
                    f"{name}: this group is {_kind_text(kind)}, {kinds[name][chosen[name]]} held groups are "
                    f"{_kind_text(chosen[name])}; a step takes one kind. Put all groups alike, or declare `requires`"
                )
    return found


def _kind_text(kind: str) -> str:
    return {WITH: "with it", WITHOUT: "without it"}.get(kind, f"of {kind}")


def count_kinds(kinds: dict[str, Counter[str]], row: GroupRow, sign: int) -> None:
    """Count the kinds of a held group. A negative sign removes it."""
    for name, kind in row.kinds:
        counts = kinds.setdefault(name, Counter())
        counts[kind] += sign
        if counts[kind] <= 0:
            del counts[kind]
