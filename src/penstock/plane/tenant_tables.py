"""The tenants that share a trainer: a replay table for each, and which of them the next step draws from.

Without shares there is one table for everything. With shares, the groups of each tenant wait in their own table. A step
takes tokens from every tenant that has groups waiting, in proportion to the shares; what one tenant leaves free goes to
the others. An evicted tenant loses its waiting groups, and its puts are rejected from then on.

With `env_weights` the same tables hold environments instead of tenants. A step then takes from every environment in
proportion to its weight, and waits for one that has too few groups: taking from the others would give most of each step
to the environment that generates fastest, whatever the weights say.

Undoing a step puts its groups back, and other groups may have taken their room since. Returned groups then queue before
their table until there is room, and no put is accepted into a table with a queue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from penstock.errors import Evicted, InvalidInput, PenstockError, UnknownKey, WaitTimeout
from penstock.log import GroupRow
from penstock.plane.fair_share import FairShare
from penstock.plane.settings import Target, Unit
from penstock.plane.snapshot import SavedTables
from penstock.replay import Drawing, Key, OnEvict, Replay, Table

_COUNTS: dict[Unit, Callable[[GroupRow], int]] = {
    "groups": lambda _row: 1,
    "samples": lambda row: row.samples,
    "tokens": lambda row: row.tokens,
}
Look = Callable[[Key], GroupRow]
"""Returns the row of the group with a key."""


class Waiting(NamedTuple):
    """A group that queues before its table."""

    key: str
    op: int
    num_bytes: int
    num_tokens: int
    policy_version: int
    priority: float = 1.0
    dispatch: int = 0
    """What `WindowedFifo` sorts by."""


class TenantTables:
    """One table per tenant, or one for everything."""

    def __init__(self, replay: Replay, on_evict: OnEvict, env_unit: Unit | None = None) -> None:
        self.env_unit = env_unit
        """The unit in which environments share a step. None: tables are of tenants, or there is one for everything."""
        self.shares = FairShare()
        """The tokens that each tenant is owed, or what each environment is owed, in the unit of the step's target."""
        self._quotas: tuple[int, dict[str, int]] | None = None
        """What `quotas` returned last, until a draw or another weight changes it."""
        self.members: set[str] = set()
        """Tenants that have a share; empty without tenants."""
        self.evicted: dict[str, str] = {}
        """Evicted tenants, with the reason."""
        self.taken: Counter[str] = Counter()
        """Tokens that steps took from each tenant."""
        self.tables: dict[str, Table] = {}
        self.overflow: dict[str, list[Waiting]] = {}
        """Table -> held groups that queue because it has no room."""
        self.given: dict[str, float] = {}
        """Priorities other than 1 of groups that are about to be inserted."""
        self._replay, self._on_evict = replay, on_evict
        self._policy_version = 0
        self.table("")  # raises now if the replay settings contradict each other

    # -------------------------------------------------------------- members

    def admit(self, tenant: str, weight: float) -> None:
        """Set the share of a tenant. Admits a new tenant, or an evicted one again."""
        self.shares.weigh(tenant, weight)
        self.evicted.pop(tenant, None)
        self.members.add(tenant)
        self._quotas = None

    def evict(self, tenant: str, reason: str) -> None:
        """Drop all waiting groups of a tenant, and reject its puts from now on."""
        self.members.discard(tenant)
        self.shares.forget(tenant)
        self._quotas = None
        self.evicted[tenant] = reason
        if tenant in self.tables:
            self.tables[tenant].clear()
        for waiting in self.overflow.pop(tenant, []):
            self._on_evict(waiting.key, "cleared")

    @property
    def is_shared(self) -> bool:
        """Whether a group's tenant or environment decides what becomes of it. Otherwise table "" takes every group."""
        return bool(self.members or self.evicted or self.env_unit is not None)

    def key_of(self, run: str, env: str) -> str:
        """Return what decides in which table a group waits: its environment, or its tenant."""
        return run if self.env_unit is None else env

    def table_for(self, tenant: str) -> str:
        """Return the table for groups of a tenant or environment. Raises Evicted, UnknownKey or InvalidInput."""
        if self.env_unit is not None and tenant not in self.members:
            known = ", ".join(map(repr, sorted(self.members)))
            raise UnknownKey(
                f"environment {tenant!r}: has no weight in this plane, which has {known}; add it to env_weights, or "
                "put samples with another `env`"
            )
        if tenant in self.evicted:
            raise Evicted(
                f"tenant {tenant!r}: evicted: {self.evicted[tenant]}; "
                f"`penstock tenants ADDRESS --share {tenant}=1` lets it in again"
            )
        if self.members and not tenant:
            raise InvalidInput(
                f"no tenant is given, and {', '.join(map(repr, sorted(self.members)))} share this plane; say which "
                "one the samples belong to: Trajectory(..., run=NAME) or Sample(..., run=NAME)"
            )
        if self.members and tenant not in self.members:
            raise UnknownKey(
                f"tenant {tenant!r}: has no share in this plane, which {', '.join(map(repr, sorted(self.members)))} "
                f"use; give it one with `penstock tenants ADDRESS --share {tenant}=1`, or plane.share({tenant!r})"
            )
        return tenant if self.members else ""

    def part(self, tenant: str) -> float:
        """Return a tenant's fraction of the trainer: its weight over the weights of all."""
        if tenant not in self.members:
            return 1.0
        # fsum, because members are a set: a plain sum in another order may differ in the last bit, and a restarted
        # plane would decide differently.
        return self.shares.weight(tenant) / math.fsum(map(self.shares.weight, self.members))

    # -------------------------------------------------------------- tables

    def table(self, table_name: str) -> Table:
        """Return a table. Creates it on first use."""
        found = self.tables.get(table_name)
        if found is None:
            found = self.tables[table_name] = Table.from_settings(self._replay, on_evict=self._on_evict)
            found.advance(self._policy_version)
        return found

    def expect(self, dispatch: int, tenant: str) -> None:
        """Note that a group is being generated. Does nothing for environments: the group's table is not known yet."""
        name = tenant if self.members else ""
        if self.env_unit is None and (name in self.members or not self.members):
            self.table(name).expect(dispatch)

    def unexpect(self, dispatch: int) -> None:
        """Note that a group arrived, or never will."""
        for table in self.tables.values():
            table.unexpect(dispatch)

    def insert(self, row: GroupRow, policy_version: int, dispatch: int) -> bool:
        """Insert a group, or queue it if its table has no room. Returns False if it is too stale to be sampled."""
        priority = self.given.pop(row.id, 1.0) if self.given else 1.0
        waiting = Waiting(row.id, row.op, row.size, row.tokens, policy_version, priority, dispatch)
        table = self.table(row.run)
        if row.run in self.overflow or not table.may_insert():
            return self._queue(row.run, waiting)
        try:
            return _insert(table, waiting)
        except WaitTimeout:  # its bytes or tokens do not fit
            return self._queue(row.run, waiting)

    def _queue(self, table_name: str, waiting: Waiting) -> bool:
        self.overflow.setdefault(table_name, []).append(waiting)
        return True

    def let_in(self) -> list[Key]:
        """Move queued groups into their tables while there is room. Returns the groups that became too stale."""
        stale: list[Key] = []
        for name in sorted(self.overflow):
            queue, table = self.overflow[name], self.table(name)
            while queue and table.may_insert():
                try:
                    if not _insert(table, queue[0]):
                        stale.append(queue[0].key)
                except WaitTimeout:
                    break
                queue.pop(0)
            if not queue:
                del self.overflow[name]
        return stale

    def remove(self, row: GroupRow) -> bool:
        """Remove a group from its table or queue. Returns False if it is in neither."""
        queue = self.overflow.pop(row.run, [])
        others = [waiting for waiting in queue if waiting.op != row.op]
        if others:
            self.overflow[row.run] = others
        if len(others) < len(queue):
            return True
        return self.table(row.run).remove([row.id]) > 0

    def waits_for(self) -> str:
        """Return what samplers wait for although groups are held, or ""."""
        found = {name: table.waits_for for name, table in sorted(self.tables.items())}
        return "; ".join(f"{name}: {text}" if name else text for name, text in found.items() if text)

    def __len__(self) -> int:
        return sum(map(len, self.tables.values())) + sum(map(len, self.overflow.values()))

    def __contains__(self, key: object) -> bool:
        return any(key in table for table in self.tables.values())

    def __iter__(self) -> Iterator[Key]:
        for _, table in sorted(self.tables.items()):
            yield from table.keys()
        for _, queue in sorted(self.overflow.items()):
            yield from (waiting.key for waiting in queue)

    def oldest_version(self) -> int | None:
        """Return the oldest policy version of all waiting groups, or None."""
        versions = [table.oldest_version for table in self.tables.values()]
        versions += [waiting.policy_version for queue in self.overflow.values() for waiting in queue]
        return min((version for version in versions if version is not None), default=None)

    def advance(self, policy_version: int) -> None:
        self._policy_version = policy_version
        for table in self.tables.values():
            table.advance(policy_version)

    def update_priorities(self, priorities: Mapping[str, float]) -> None:
        """Set priorities by key. Keys that are not held are ignored."""
        for table in self.tables.values():
            table.update_priorities({key: value for key, value in priorities.items() if key in table})

    # -------------------------------------------------------------- steps

    def apportion(self, target: Target, held: int, look: Look) -> Mapping[str, int] | Target | None:
        """Return what `draw` should take to fill a step, or None if there is not enough.

        A target of groups becomes a number of groups per table. A target of samples or tokens is returned as it is:
        how many groups fill it is known only when they are drawn. `held` is what all tables and queues hold, in the
        unit of the target."""
        if target.groups is None:
            queued = [look(waiting.key) for queue in self.overflow.values() for waiting in queue]
            apart = sum(target.measure(row.samples, row.tokens) for row in queued)
            return target if held - apart >= target.amount else None
        waiting = {table_name: table for table_name, table in sorted(self.tables.items()) if len(table)}
        if len(waiting) < 2 and self.env_unit is None:
            return {
                table_name: target.groups for table_name, table in waiting.items() if len(table) >= target.groups
            } or None
        if self.env_unit is not None:
            quotas = self.quotas(target.groups)
            enough = all(self.table(env).may_sample(quota) for env, quota in quotas.items() if quota)
            return {env: quota for env, quota in quotas.items() if quota} if enough else None
        queues = {table_name: iter(table.keys()) for table_name, table in waiting.items()}
        shares, counts, have = self.shares.copy(), dict.fromkeys(waiting, 0), 0
        while queues and have < target.amount:
            table_name = shares.most_owed(queues)
            key = next(queues[table_name], None)
            if key is None or not waiting[table_name].may_sample(counts[table_name] + 1):
                del queues[table_name]
                continue
            row = look(key)
            counts[table_name] += 1
            have += 1
            shares.charge(table_name, row.tokens)
        return {table_name: count for table_name, count in counts.items() if count} if have >= target.amount else None

    def quotas(self, groups: int) -> Mapping[str, int]:
        """Return how many groups of each environment make the next step.

        Weights 2 and 1, steps of 4 groups: 2 and 2, 3 and 1, 3 and 1. What rounding gives to one is owed to the other.
        """
        if self._quotas is None or self._quotas[0] != groups:  # asked for in every turn of the loop while ranks wait
            shares, counts = self.shares.copy(), dict.fromkeys(sorted(self.members), 0)
            for _ in range(groups):
                env = shares.most_owed(counts)
                counts[env] += 1
                shares.charge(env, 1)
            self._quotas = (groups, counts)
        return self._quotas[1]

    def draw(self, what: Mapping[str, int] | Target, look: Look, *, one_by_one: bool = False) -> tuple[int, ...]:
        """Take groups for a step. Raises WaitTimeout if there are too few. `one_by_one` repeats a draw by target."""
        if isinstance(what, Target):
            return self._draw_until(what, look)
        return self._draw_again(what, look) if one_by_one else self._draw(what, look)

    def _draw(self, counts: Mapping[str, int], look: Look) -> tuple[int, ...]:
        """Take a number of groups from each table."""
        busy = self._busy()
        taken: dict[str, list[tuple[Key, Any]]] = {}
        for table_name in sorted(counts):
            batch = self.tables[table_name].sample(counts[table_name], timeout=0)
            taken[table_name] = list(zip(batch.keys.tolist(), batch.items.tolist(), strict=True))
        return self._charge(taken, busy, look)

    def _draw_until(self, target: Target, look: Look) -> tuple[int, ...]:
        """Take groups one at a time from the tenant that is owed most, until they fill a step. Enough must be held.

        Raises WaitTimeout and undoes the draw if the limiter allows too few."""
        busy = self._busy()
        # Enough is held, so if everything may be drawn the target is met and nothing needs to be undone. A single
        # environment may still have too few.
        undoable = self.env_unit is not None or not all(self.tables[name].may_sample_all for name in busy)
        drawings = {name: self.tables[name].drawing(undoable=undoable) for name in busy}
        shares, have = self.shares.copy(), 0
        try:
            while have < target.amount:
                if not busy:
                    raise WaitTimeout(
                        "; ".join(filter(None, [f"{have} of {target} may be drawn now", self.waits_for()]))
                    )
                table_name = shares.most_owed(busy)
                key = drawings[table_name].pick()
                if key is None and self.env_unit is not None:
                    raise WaitTimeout(f"environment {table_name!r} has too few groups for {target}")
                if key is None:
                    busy.remove(table_name)
                    continue
                row = look(key)
                have += target.measure(row.samples, row.tokens)
                shares.charge(table_name, self._price(row))
        except PenstockError:
            for drawing in drawings.values():
                drawing.undo()
            raise
        return self._take(drawings, look)

    def _draw_again(self, counts: Mapping[str, int], look: Look) -> tuple[int, ...]:
        """Repeat a draw of `_draw_until` from the number of groups it took from each table.

        The order across tables depends on sizes and shares; the order within one table only on the sampler. So the
        numbers are enough."""
        drawings = {name: self.tables[name].drawing(undoable=False) for name in self._busy()}
        for table_name, count in counts.items():
            if None in [drawings[table_name].pick() for _ in range(count)]:
                raise WaitTimeout(f"{count} groups of {table_name!r} may not be drawn")
        return self._take(drawings, look)

    def _take(self, drawings: Mapping[str, Drawing], look: Look) -> tuple[int, ...]:
        taken = {name: drawing.take() for name, drawing in sorted(drawings.items()) if len(drawing)}
        return self._charge(taken, sorted(drawings), look)

    def _price(self, row: GroupRow) -> int:
        """Return what a group is charged for."""
        return row.tokens if self.env_unit is None else _COUNTS[self.env_unit](row)

    def _busy(self) -> list[str]:
        """Return the tables that take part in a step: those that hold groups; of environments all."""
        if self.env_unit is not None:
            for name in self.members:
                self.table(name)  # made on first use
            return sorted(self.members)
        return sorted(table_name for table_name, table in self.tables.items() if len(table))

    def _charge(self, taken: Mapping[str, list[tuple[Key, Any]]], busy: list[str], look: Look) -> tuple[int, ...]:
        for table_name, groups in taken.items():
            rows = [look(key) for key, _ in groups]
            self.taken[table_name] += sum(row.tokens for row in rows)
            self.shares.charge(table_name, sum(map(self._price, rows)))
        self.shares.settle(busy)
        self._quotas = None
        for table_name in busy if self.env_unit is None else ():  # an environment without groups is waited for
            if not len(self.tables[table_name]):
                self.shares.forget(table_name)
        return tuple(int(op) for groups in taken.values() for _, op in groups)

    # -------------------------------------------------------------- snapshots

    def save(self) -> SavedTables:
        return SavedTables(
            tables={table_name: table.to_bytes(dump=_op_to_bytes) for table_name, table in self.tables.items()},
            policy_version=self._policy_version,
            members=self.members,
            weights=self.shares.weights,
            owed=self.shares.owed,
            evicted=self.evicted,
            taken=dict(self.taken),
            overflow={name: [*queue] for name, queue in self.overflow.items()},
        )

    def load(self, saved: SavedTables) -> None:
        """Restore what `save` returned, with the same replay settings."""
        self.tables.clear()  # before the others are made: a table takes memory by its capacity, not by what it holds
        for table_name, data in saved.tables.items():
            self.tables[table_name] = Table.restore(
                data, load=_op_from_bytes, on_evict=self._on_evict, **self._replay.parts
            )
        self._policy_version = saved.policy_version
        self.members, self.evicted, self.taken = saved.members, saved.evicted, Counter(saved.taken)
        self.shares.weights, self.shares.owed = saved.weights, saved.owed
        self._quotas = None
        self.overflow = {name: [Waiting(*waiting) for waiting in queue] for name, queue in saved.overflow.items()}

    # -------------------------------------------------------------- looking

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all tables as if they were one: sums, maxima, means over items."""
        all_of = [table.metrics() for table in self.tables.values()]
        if len(all_of) == 1:
            return all_of[0]
        return {name: _joined(name, all_of) for name in all_of[0]}

    def report(self) -> dict[str, dict[str, Any]]:
        """Return what `penstock tenants` shows of each tenant, evicted ones included."""
        found: dict[str, dict[str, Any]] = {}
        for tenant in sorted(self.members | self.evicted.keys()):
            found[tenant] = {
                "share": self.part(tenant) if tenant in self.members else 0.0,
                "held_groups": len(self.tables[tenant]) if tenant in self.tables else 0,
                "taken_tokens": self.taken[tenant],
                "evicted": self.evicted.get(tenant),
            }
        return found


def _insert(table: Table, group: Waiting) -> bool:
    handle = table.insert(
        group.key,
        group.op,
        priority=group.priority,
        num_bytes=group.num_bytes,
        num_tokens=group.num_tokens,
        policy_version=group.policy_version,
        dispatch=group.dispatch,
        timeout=0,
    )
    return handle is not None


def _op_to_bytes(op: int) -> bytes:
    return op.to_bytes(8, "little")


def _op_from_bytes(data: memoryview) -> int:
    return int.from_bytes(data, "little")


def _joined(name: str, all_of: list[dict[str, float]]) -> float:
    values = [found[name] for found in all_of]
    if name.endswith("_mean"):
        weights = [found[f"{name.partition('/')[0]}/items"] for found in all_of]
        return sum(v * w for v, w in zip(values, weights, strict=True)) / max(sum(weights), 1)
    return max(values) if name.endswith(("_max", "policy_version")) else sum(values)
