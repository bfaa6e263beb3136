"""Who is next, when several names share something by weight: tenants a trainer, environments a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.errors import ConfigError


class FairShare:
    """Deficit counters: how much each name is owed.

    A name that takes something is charged for it. The total taken is then credited to all names that wanted some, in
    proportion to their weights. So each name's share follows its weight to within one or two pieces, however large the
    pieces are, and the counters always sum to 0.

    >>> shares = FairShare()
    >>> shares.weigh("a", 3.0)
    >>> taken = []
    >>> for _ in range(8):
    ...     taken.append(shares.most_owed(["a", "b"]))
    ...     shares.charge(taken[-1], 10)
    ...     shares.settle(["a", "b"])
    >>> "".join(taken)
    'abaaabaa'
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        """Weights other than 1."""
        self.owed: dict[str, float] = {}
        """How far each name is behind its share; negative if ahead."""

    def weigh(self, name: str, weight: float) -> None:
        """Set the weight of a name. The default is 1."""
        if not 0 < weight < float("inf"):
            raise ConfigError(f"weight of tenant {name!r}: {weight}; must be a positive number")
        self.weights[name] = weight

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)

    def most_owed(self, names: Iterable[str]) -> str:
        """Return the name that is furthest behind its share; the first of equals."""
        return max(names, key=lambda name: self.owed.get(name, 0.0) / self.weight(name))

    def charge(self, name: str, amount: float) -> None:
        self.owed[name] = self.owed.get(name, 0.0) - amount

    def settle(self, names: Collection[str]) -> None:
        """Credit the total taken to these names. The sum returns to 0, so a new name starts level with the rest.

        Weights a: 3, b: 1. After a took 40: owed a = -40, b = 0, so 40 is credited, 30 to a and 10 to b: a = -10,
        b = 10, and it is b's turn."""
        total = sum(self.weight(name) for name in names)
        # The sum is minus what was taken, and lacks the counters of names that were forgotten since.
        debt = -sum(self.owed.get(name, 0.0) for name in names)
        for name in names:
            self.owed[name] = self.owed.get(name, 0.0) + debt * self.weight(name) / total

    def forget(self, name: str) -> None:
        """Reset the counter of a name that has nothing waiting. Its weight stays."""
        self.owed.pop(name, None)

    def copy(self) -> FairShare:
        """Copy the counters, to try a draw."""
        other = FairShare()
        other.weights, other.owed = dict(self.weights), dict(self.owed)
        return other
