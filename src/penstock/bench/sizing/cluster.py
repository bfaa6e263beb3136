"""A cluster as discrete events: workers, keepers, links and ranks around a real engine that sees facts.

    worker   generates a group, encodes it, hands it to the keeper of its node
    keeper   checks it, writes and syncs it, copies it to other nodes; then its facts go to the plane
    plane    accepts it (the real engine), syncs its log, answers: that is a put
    plane    draws and plans a step (the real engine and planner), syncs its log, tells every rank what to take
    ranks    take their samples from keepers, fill, train; while they train the next step is made

Which group is in which step, and which sample on which rank, is decided by the code of a real plane. How long it all
takes is computed from `Constants` and the links that are given. Nothing is random but what the seed gives.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.bench.facts_only import Elsewhere
from penstock.bench.sizing.calibrate import SIZE, make_group
from penstock.bench.sizing.constants import Constants
from penstock.bench.sizing.events import Act, BatchQueue, Busy, Clock, Countdown, Queue
from penstock.bench.sizing.model import Cluster, Measured, facts_of
from penstock.encode import encode
from penstock.errors import Overloaded
from penstock.keep import GroupFacts, Pick, check_group
from penstock.pack import Packing
from penstock.serve.decisions.acceptance import Outcome
from penstock.serve.decisions.engine import Drawn, Engine
from penstock.serve.decisions.log import Log
from penstock.serve.decisions.step_builder import Place, PlannedStep, StepBuilder, picks_of
from penstock.serve.settings import PlaneSettings, Replay, Target

_SPREAD = 0.6
"""Of the logarithm of lengths."""
_SWITCH_S = 0.005
"""After which threads of one interpreter take turns."""
_PICK_BYTES = 60
"""Of one group in what a rank is told to take."""


@dataclass(slots=True)
class _Node:
    keeper: Queue
    disk: BatchQueue
    sends: Queue
    receives: Queue

    @property
    def servers(self) -> tuple[Busy, ...]:
        return self.keeper.busy, self.disk.busy, self.sends.busy, self.receives.busy


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    lengths: NDArray[np.int64]
    at: tuple[int, ...]
    """Nodes that keep it, the worker's own first."""
    facts: GroupFacts
    began: float
    """When it was generated."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


class Simulation:
    """One run of a cluster; `run` it, then look at `seen` and the servers."""

    def __init__(self, cluster: Cluster, constants: Constants) -> None:
        self.cluster, self.constants = cluster, constants
        self._kind, self._costs = constants.kinds[cluster.columns], constants.plane
        self._rng = np.random.default_rng(cluster.seed)
        self.clock = Clock()
        self.plane = Queue(self.clock, slice_s=_SWITCH_S)
        self.log_disk = self._disk()
        self.nodes = [
            _Node(Queue(self.clock, slice_s=_SWITCH_S), self._disk(), Queue(self.clock), Queue(self.clock))
            for _ in range(cluster.nodes)
        ]
        self.seen = Measured()
        self._template = check_group(encode(make_group("text", 32)), group="g", seq_len=64)
        self._groups: dict[str, _Group] = {}
        self._waiting: deque[tuple[_Group, int, float]] = deque()
        """Groups there is no room for, with their workers, and since when."""
        self._made = 0
        self._wanted, self._ready, self._training = 0, 0, False
        self._step_tokens: dict[int, int] = {}
        self._train_s = 0.8 * cluster.step_s if cluster.train_s is None else cluster.train_s
        packing = Packing(ranks=cluster.ranks, seq_len=4 * cluster.tokens)
        settings = PlaneSettings(
            packing=packing,
            target=Target(groups=cluster.groups_per_step),
            replay=Replay(capacity=3 * cluster.groups_per_step),
            max_held_bytes=1 << 60,
            retain_steps=0,
        )
        self._log = Log(None)
        self._engine = Engine(settings, self._log, Elsewhere())
        self._builder = StepBuilder(packing, Elsewhere())

    def _disk(self) -> BatchQueue:
        return BatchQueue(self.clock, self.constants.disk.sync_s, self.constants.disk.write_bytes_s)

    def run(self) -> None:
        """Until the last step is ready."""
        for worker in range(self.cluster.workers):
            self._generate(worker, part=float(self._rng.random()))
        self._want(1)
        last = self.cluster.warm_up + self.cluster.steps
        self.clock.run(lambda: self._ready >= last)
        self._log.close()

    # -------------------------------------------------------------- puts

    def _generate(self, worker: int, part: float = 1.0) -> None:
        mean = np.log(self.cluster.tokens) - _SPREAD**2 / 2
        drawn = self._rng.lognormal(mean, _SPREAD, SIZE)
        lengths = np.clip(drawn, 16, 4 * self.cluster.tokens).astype(np.int64)
        home = worker % self.cluster.nodes
        others = self._rng.integers(1, self.cluster.nodes, self.cluster.copies - 1) if self.cluster.nodes > 1 else ()
        at = (home, *((home + int(step)) % self.cluster.nodes for step in others))
        seconds = part * int(lengths.sum()) / self.cluster.generate_tokens_s
        self.clock.after(seconds, lambda: self._put(worker, lengths, tuple(dict.fromkeys(at))))

    def _put(self, worker: int, lengths: NDArray[np.int64], at: tuple[int, ...]) -> None:
        self._made += 1
        name = f"g{self._made}"
        group = _Group(name, lengths, at, facts_of(self._template, name, lengths), self.clock.now)
        home, size = self.nodes[at[0]], self._kind.frame_bytes * group.tokens

        def checked() -> None:
            kept = Countdown(len(at), lambda: self._offer(group, worker))
            home.disk.write(size, kept)
            for other in at[1:]:
                self._send(at[0], other, size, lambda other=other: self._copy(other, size, kept))  # type: ignore[misc]

        def arrived() -> None:
            seconds = self._kind.keep.of(group.tokens) + self.constants.send_byte_s * size * len(at)
            home.keeper.do(seconds + self.constants.call_s * (1 + len(at)), checked)

        self.clock.after(self._kind.encode.of(group.tokens), arrived)

    def _copy(self, node: int, size: float, kept: Countdown) -> None:
        seconds = self.constants.call_s + self.constants.send_byte_s * size
        self.nodes[node].keeper.do(seconds, lambda: self.nodes[node].disk.write(size, kept))

    def _send(self, sender: int, receiver: int, size: float, then: Act) -> None:
        """Bytes from node to node: as long on either link as the link needs for them."""
        seconds = size / self.cluster.link_bytes_s
        self.seen.network_bytes += size

        def sent() -> None:
            self.clock.after(self.cluster.delay_s, lambda: self.nodes[receiver].receives.do(seconds, then))

        self.nodes[sender].sends.do(seconds, sent)

    def _offer(self, group: _Group, worker: int) -> None:
        """Its facts go to the plane."""
        self.seen.plane_bytes += self._costs.facts_bytes + 100
        self.clock.after(
            self.cluster.delay_s,
            lambda: self.plane.do(
                self._costs.accept_s + self.constants.call_s, lambda: self._accept(group, worker, self.clock.now)
            ),
        )

    def _accept(self, group: _Group, worker: int, since: float) -> None:
        acceptance = self._engine.acceptance
        offered = acceptance.offer(group.name, group.name, group.facts.digests[0], group.tokens)
        if isinstance(offered, Outcome):
            assert isinstance(offered.error, Overloaded), offered.error
            self._waiting.append((group, worker, since))
            return
        acceptance.arrive(group.name, group.facts, f"elsewhere:{group.name}")
        assert all(outcome.error is None for outcome in acceptance.flush())
        self._groups[group.name] = group
        no_room_s = self.clock.now - since
        self.seen.no_room_s += no_room_s
        self.log_disk.write(self._costs.facts_bytes, lambda: self._answer(group, worker, no_room_s))
        self._draw()

    def _answer(self, group: _Group, worker: int, no_room_s: float) -> None:
        self.seen.puts.append(self.clock.now + self.cluster.delay_s - group.began - no_room_s)
        self.clock.after(self.cluster.delay_s, lambda: self._generate(worker))

    # -------------------------------------------------------------- steps

    def _want(self, step: int) -> None:
        """Every rank asks for a step."""
        self._wanted = step
        self.plane.do(self._costs.protocol_s * self.cluster.ranks / 2, self._draw)

    def _draw(self) -> None:
        engine = self._engine
        if engine.last_step >= self._wanted or engine.state.is_drawing:
            return
        drawn = engine.draw_step(self._wanted)
        if not isinstance(drawn, Drawn):
            return
        began, samples = self.clock.now, self.cluster.groups_per_step * SIZE
        planned = self._builder.plan([GroupFacts.from_bytes(data) for data in drawn.facts])
        seconds = self._costs.sample_s * samples + self._costs.rank_s * self.cluster.ranks

        def recorded() -> None:
            self._engine.record(drawn, planned)
            self._step_tokens[drawn.step] = sum(self._groups[place.group].tokens for place in drawn.groups)
            size = sum(map(len, planned.rank_plans)) + sum(map(len, planned.needs))
            self.log_disk.write(size, lambda: self._deliver(drawn.step, planned, drawn.groups, began))

        self.plane.do(seconds, recorded)

    def _deliver(self, step: int, planned: PlannedStep, places: tuple[Place, ...], began: float) -> None:
        everybody = Countdown(self.cluster.ranks, lambda: self._filled(step, began))
        requests = picks_of([np.frombuffer(need, "<i4") for need in planned.needs], places)
        told = self._costs.protocol_s * self.cluster.ranks / 2
        takes = [self._takes(rank, request) for rank, request in enumerate(requests)]
        sizes = [len(planned.rank_plans[rank]) + _PICK_BYTES * len(request) for rank, request in enumerate(requests)]
        self.seen.plane_bytes += sum(sizes)

        def all_told() -> None:
            for rank, parts in enumerate(takes):
                self.clock.after(self.cluster.delay_s, lambda r=rank, p=parts: self._take(r, p, began, everybody))  # type: ignore[misc]

        self.plane.do(told + self.constants.send_byte_s * sum(sizes), all_told)

    def _takes(self, rank: int, request: list[Pick]) -> dict[int, tuple[int, int]]:
        """Node -> samples and tokens that a rank takes from its keeper: its own node's where that has a copy."""
        own, found = self._node_of(rank), defaultdict[int, tuple[int, int]](lambda: (0, 0))
        for pick in request:
            group = self._groups[pick.group]
            node = own if own in group.at else group.at[0]
            samples, tokens = found[node]
            found[node] = (samples + len(pick.rows), tokens + int(group.lengths[list(pick.rows)].sum()))
        return dict(found)

    def _node_of(self, rank: int) -> int:
        return rank * self.cluster.nodes // self.cluster.ranks

    def _take(self, rank: int, parts: dict[int, tuple[int, int]], began: float, everybody: Countdown) -> None:
        own = self._node_of(rank)
        tokens = sum(count for _, count in parts.values())
        fill_s = self._kind.fill.of(tokens) + self.constants.send_byte_s * self._kind.taken_bytes * tokens

        def filled() -> None:
            self.seen.rank_steps.append(self.clock.now - began)
            everybody()

        all_here = Countdown(max(len(parts), 1), lambda: self.clock.after(fill_s, filled))
        if not parts:
            all_here()
        for node, (_, count) in parts.items():
            size = self._kind.taken_bytes * count
            seconds = self._kind.take.of(count) + self.constants.send_byte_s * size + self.constants.call_s
            if node == own:
                self.nodes[node].keeper.do(seconds, all_here)
            else:
                self.nodes[node].keeper.do(
                    seconds,
                    lambda node=node, size=size: self._send(node, own, size, all_here),  # type: ignore[misc]
                )

    def _filled(self, step: int, began: float) -> None:
        """Every rank has the step: it is released, and trained as soon as the one before it is."""

        def released() -> None:
            self.seen.steps.append(self.clock.now - began)
            self.seen.tokens += self._step_tokens.pop(step)
            self._ready = step
            if step == self.cluster.warm_up:
                self._begin_counting()
            if not self._training:
                self._train(step)

        self.plane.do(self._costs.protocol_s * self.cluster.ranks / 2, released)

    def _train(self, step: int) -> None:
        self._training = True
        self._want(step + 1)
        self.clock.after(self._train_s, lambda: self._trained(step))

    def _trained(self, step: int) -> None:
        self.seen.trained_s += min(self._train_s, self.clock.now - self.seen.since)
        self._training = False
        self.plane.do(self._costs.protocol_s * self.cluster.ranks / 2, lambda: self._commit(step))
        if self._ready > step:
            self._train(step + 1)

    def _commit(self, step: int) -> None:
        names = [row.id for row in self._log.groups_of(self._engine.state.steps[step].groups)]
        self._engine.commit(step, None)
        for name in names:
            del self._groups[name]
        waiting, self._waiting = self._waiting, deque()
        for group, worker, since in waiting:
            self._accept(group, worker, since)

    def _begin_counting(self) -> None:
        self.seen = Measured(since=self.clock.now)
        for queue in [
            self.plane,
            self.log_disk,
            *(q for n in self.nodes for q in (n.keeper, n.disk, n.sends, n.receives)),
        ]:
            queue.busy.restart()
