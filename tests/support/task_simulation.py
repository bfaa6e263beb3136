"""Simulated workers that lease prompts: they crash, lose answers, put late, and every prompt is trained once per epoch.

python -m tests.support.task_simulation --seed 17        one seed, with what happened
python -m tests.support.task_simulation --seeds 1000     many, until one fails
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import msgspec

from penstock.client.prompt_lists import order_fields
from penstock.errors import PenstockError
from penstock.plane.settings import Replay
from penstock.plane.task_book import read_task
from penstock.protocol import (
    Accepted,
    AddPrompts,
    Answered,
    FromClient,
    LeaseTasks,
    OfferPrompts,
    PromptsOffered,
    Rejected,
    Renew,
    Renewed,
    TasksLeased,
    chunk_prompts,
    list_digest,
)
from penstock.replay import Curriculum, DifficultyPools, Thompson
from tests.support.simulated import Rank
from tests.support.simulated_producer import Producer
from tests.support.simulation import Simulation

EPOCHS, LEASE_S = 2, 1.0
ORDERS: dict[str, Curriculum | None] = {
    "sequential": None,
    "pools": DifficultyPools({0.4: 1.0, 1.0: 3.0}),
    "thompson": Thompson(),
}


class Worker(Producer):
    """Opens the list, leases tasks, renews, and puts a group for each. What it makes differs from what others make."""

    world: TaskSimulation

    def __init__(self, world: TaskSimulation, number: int, names: list[str]) -> None:
        super().__init__(world, number, iter(()), at_once=2)
        self._chunks = list(chunk_prompts([(name, b"") for name in names]))
        self._missing: list[int] = []
        self._own = Random(f"worker {number} of {world.seed}")

    def start(self) -> None:
        self._asked: int | None = None
        self._is_open = False
        self._leases: dict[str, int] = {}
        """Group -> lease, of tasks at hand."""
        self._renewing: int | None = None
        if self._own.random() < 0.5:  # else what it made survived the crash, and is put without a lease
            self._frames = {}
        super().start()
        self._renew_now_and_then(self.life)

    def put(self) -> None:
        if not self.up or len(self._tickets) >= self._at_once:
            return
        under_way = set(self._tickets.values())
        group = next((group for group in self._frames if group not in under_way), None)
        if group is not None:
            self._put(group)
        elif self._asked is None:
            self._asked, events = self._session.ask(self._request, self.world.clock.now)
            self.handle(events)

    def _request(self, ticket: int) -> FromClient:
        digests = tuple(chunk.digest for chunk in self._chunks)
        if self._missing:
            number = self._missing[0]
            return AddPrompts(
                ticket=ticket, digest=list_digest(digests), chunk=number, **self._chunks[number]._asdict()
            )
        if self._is_open:
            return LeaseTasks(ticket=ticket, list="p", count=2, worker=self.peer, lease_s=LEASE_S)
        return OfferPrompts(
            ticket=ticket,
            list="p",
            digest=list_digest(digests),
            count=sum(len(chunk.names) for chunk in self._chunks),
            chunks=digests,
            epochs=EPOCHS,
            seed=self.world.seed,
            attempts=1000,
            again=("stale",),
            **order_fields(self.world.order, self.world.names),
        )

    def _renew_now_and_then(self, life: int) -> None:
        def look() -> None:
            if self.life != life or not self.up:
                return
            if self._leases and self._renewing is None:
                leases = tuple(self._leases.values())
                make = partial(_renew, leases)
                self._renewing, events = self._session.ask(make, self.world.clock.now)
                self.handle(events)
            self.world.clock.after(LEASE_S / 3, lambda: self.hears(look))

        self.hears(look)

    def answered(self, event: Answered) -> None:
        answer: Any = event.answer
        if event.ticket == self._renewing:
            self._renewing = None
            assert isinstance(answer, Renewed), answer
            gone = {lease for lease, _ in answer.cancelled}
            self._leases = {group: lease for group, lease in self._leases.items() if lease not in gone}
        elif event.ticket == self._asked:
            self._asked = None
            self._on_answer(answer)
            self.world.clock.after(self._own.random() * 0.1, lambda: self.hears(self.put))
        elif isinstance(answer, Accepted) and answer.late:
            self.world.late += 1
            group = self._tickets[event.ticket]
            self._frames.pop(group, None)
            self._leases.pop(group, None)
            self.again(event.ticket)
        else:
            self._leases.pop(self._tickets.get(event.ticket, ""), None)
            super().answered(event)

    def _on_answer(self, answer: Any) -> None:
        if isinstance(answer, PromptsOffered):
            self._missing, self._is_open = list(answer.missing), not answer.missing
        elif isinstance(answer, Accepted):
            self._missing = self._missing[1:]
        elif isinstance(answer, Rejected):
            assert answer.kind in ("DiskFull", "UnknownKey"), answer  # a plane that restarted knows of no upload
            self._missing, self._is_open = [], False
        else:
            assert isinstance(answer, TasksLeased), answer
            for one in answer.tasks:
                made = (one.group, 1 + self._own.randrange(3), answer.policy_version)
                self._frames[one.group] = msgspec.msgpack.encode(made)
                self._leases[one.group] = one.lease

    def failed(self, error: PenstockError) -> None:
        self._asked = self._renewing = None
        super().failed(error)
        self.world.clock.after(0.1, lambda: self.hears(self.put))


def _renew(leases: tuple[int, ...], ticket: int) -> Renew:
    return Renew(ticket=ticket, leases=leases)


class TaskSimulation(Simulation):
    """A run whose groups are those of leased prompts."""

    def __init__(self, seed: int, order: Curriculum | None = None, **more: Any) -> None:
        super().__init__(seed, **more)
        self.order = order
        rng = Random(f"tasks of {seed}")
        replay = Replay(capacity=64, max_staleness=rng.choice([None, 2, 1]))
        self.settings = replace(self.settings, replay=replay, shares={})
        self.is_queue, self.late = False, 0
        self.names = [f"n{number}" for number in range(self.last)]  # two groups a step, two epochs
        ranks = [member for member in self.members if isinstance(member, Rank)]
        self.members = [*ranks, *(Worker(self, number, self.names) for number in range(rng.choice([1, 2, 3])))]

    def _check_end(self) -> None:
        state = self.server.engine.state
        trained = Counter((task.epoch, task.prompt) for task in map(read_task, self._all_trained()) if task)
        if self.order is None:
            wanted = {(epoch, number) for epoch in range(1, EPOCHS + 1) for number in range(len(self.names))}
        else:  # a prompt that came three times came a first, a second and a third time
            times = Counter(number for _, number in trained)
            wanted = {(time, number) for number in times for time in range(1, times[number] + 1)}
            self.oracle.check(len(wanted) == EPOCHS * len(self.names), f"not as many as the epochs have: {times}")
        self.oracle.check(trained == dict.fromkeys(wanted, 1), f"not each task once: {trained}")
        found = state.tasks.lists["p"]
        self.oracle.check(not found.held and not found.dropped, f"held {found.held}, dropped {found.dropped}")
        super()._check_end()

    def _all_trained(self) -> list[str]:
        return [group for step in range(1, self.last + 1) for group in self._groups_of(step)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--order", choices=ORDERS, default="sequential")
    asked = parser.parse_args()
    if asked.seed is not None:
        TaskSimulation(asked.seed, ORDERS[asked.order], note=print).run()
        return
    late = 0
    for seed in range(asked.seeds):
        one = TaskSimulation(seed, ORDERS[asked.order])
        one.run()
        late += one.late
        sys.stdout.write(f"\r{seed + 1} runs, {late} late groups ")


if __name__ == "__main__":
    main()
