"""Groups that were offered and are not accepted yet: they take room, and somebody waits for each of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.frames import EvalMetadata, GroupMetadata
from penstock.log import GroupRow, State
from penstock.plane.over_length import NONE, OverLength


@dataclass(slots=True)
class Arrival:
    """One of them."""

    group: str
    digest: bytes
    size: int
    table_name: str | None
    """Where it will wait; None for an evaluation group, which waits nowhere."""
    tickets: list[object]
    """Everybody who waits for it."""
    kept: tuple[GroupMetadata, str] | None = None
    """Its metadata and its frame's location, once it was checked and kept."""
    eval_metadata: EvalMetadata | None = None
    """Of an evaluation group, once it was checked and kept."""
    over_length: OverLength = NONE
    """What was truncated or dropped of its samples."""
    priority: float = 1.0
    raw_metadata: bytes = b""
    """Its metadata as they came, where the log takes them as they are."""

    @property
    def is_evaluation(self) -> bool:
        return self.table_name is None


class Arrivals:
    """All of them, and the room they take in each table."""

    def __init__(self) -> None:
        self.groups: Counter[str | None] = Counter()
        self.bytes: Counter[str | None] = Counter()
        self._all: dict[str, Arrival] = {}

    def get(self, group: str) -> Arrival | None:
        return self._all.get(group)

    def __getitem__(self, group: str) -> Arrival:
        return self._all[group]

    def add(self, arrival: Arrival) -> None:
        self._all[arrival.group] = arrival
        self._count(arrival, 1)

    def pop(self, group: str) -> Arrival:
        arrival = self._all.pop(group)
        self._count(arrival, -1)
        return arrival

    def move(self, group: str, table_name: str) -> None:
        """It waits in another table than it was offered for."""
        arrival = self._all[group]
        self._count(arrival, -1)
        arrival.table_name = table_name
        self._count(arrival, 1)

    def _count(self, arrival: Arrival, sign: int) -> None:
        self.groups[arrival.table_name] += sign
        self.bytes[arrival.table_name] += sign * arrival.size

    @property
    def ready(self) -> list[str]:
        """Those that were checked and kept."""
        return [group for group, arrival in self._all.items() if arrival.kept is not None]

    def priorities(self) -> dict[str, float]:
        """Of those that were checked and kept and have another priority than 1."""
        ready = [self._all[group] for group in self.ready]
        return {one.group: one.priority for one in ready if one.priority != 1.0 and not one.is_evaluation}

    def rows(self, op: int) -> list[tuple[GroupRow, bytes]]:
        """Those that were checked and kept with their metadata, as the log will have them, numbered from `op` on."""
        rows: list[tuple[GroupRow, bytes]] = []
        for number, group in enumerate(self.ready, start=op):
            arrival = self._all[group]
            assert arrival.kept is not None
            metadata, location = arrival.kept
            row = GroupRow(
                op=number,
                id=group,
                digest=arrival.digest,
                policy_version=metadata.policy_version,
                samples=metadata.num_samples,
                tokens=metadata.num_tokens,
                size=arrival.size,
                state=State.EVALUATION if arrival.is_evaluation else State.HELD,
                run=metadata.run if arrival.table_name is None else arrival.table_name,
                prompt=metadata.prompt,
                kinds=tuple(sorted(metadata.kinds.items())),
                location=location,
            )
            rows.append((row, arrival.raw_metadata or (arrival.eval_metadata or metadata).to_bytes()))
        return rows
