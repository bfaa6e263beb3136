"""Fair shares: who is owed most, kept in deficit counters.

Whoever takes something is charged for it; what was taken in total is then credited to all who wanted some, in
proportion to their weights. So what each one gets follows its weight to within one piece or two, however large the
pieces are, and the counters always add up to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.errors import ConfigError


class FairShare:
    """What each name is owed.

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
        """Of those that have another weight than 1."""
        self.owed: dict[str, float] = {}
        """What each is behind its share; negative when it is ahead."""

    def weigh(self, name: str, weight: float) -> None:
        """Give a name more or less than the weight of 1 that every name has."""
        if not 0 < weight < float("inf"):
            raise ConfigError(f"weight of run {name!r}: {weight}; must be a positive number")
        self.weights[name] = weight

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)

    def most_owed(self, names: Iterable[str]) -> str:
        """Whose turn it is; of equals the first."""
        return max(names, key=lambda name: self.owed.get(name, 0.0) / self.weight(name))

    def charge(self, name: str, amount: float) -> None:
        self.owed[name] = self.owed.get(name, 0.0) - amount

    def settle(self, names: Collection[str]) -> None:
        """Credit what was taken to these, and keep the sum at 0, so that a newcomer starts level with the rest."""
        total = sum(self.weight(name) for name in names)
        # What they are owed sums to minus what was taken, and to what those that left took with them.
        debt = -sum(self.owed.get(name, 0.0) for name in names)
        for name in names:
            self.owed[name] = self.owed.get(name, 0.0) + debt * self.weight(name) / total

    def forget(self, name: str) -> None:
        """It wants nothing any more, so it is owed nothing and owes nothing; its weight stays."""
        self.owed.pop(name, None)

    def copy(self) -> FairShare:
        """The same counters, to try something out on."""
        other = FairShare()
        other.weights, other.owed = dict(self.weights), dict(self.owed)
        return other
