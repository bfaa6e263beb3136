"""What a simulated cluster says: how long puts and steps take, how busy everything is, what is full first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from penstock.bench.sizing.cluster import Simulation
from penstock.bench.sizing.constants import Constants
from penstock.bench.sizing.events import Busy
from penstock.bench.sizing.model import Cluster

KEEPS_UP = 0.9
"""Of what is offered. A cluster that trains less, while its trainer waits, is full somewhere. Servers that wait for one
another in bursts (a step is taken by all ranks at once) are never busy all of the time, so that does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How busy the servers of one kind are, as a share of their time."""

    mean: float
    most: float
    """Of the busiest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The answer for one cluster."""

    put_p50_s: float
    put_p99_s: float
    step_p50_s: float
    """From enough groups and all ranks asking, until every rank has filled the step."""
    step_p99_s: float
    rank_step_p99_s: float
    """Until one rank has."""
    tokens_s: float
    """Of steps that were given to the trainer."""
    offered_tokens_s: float
    """That workers would generate if they never waited."""
    busy: dict[str, Share]
    first: str
    """What is busiest: more load fills it first."""
    headroom: float
    """How many times the load until it is full."""
    is_full: bool
    """Whether the trainer gets clearly less than is offered, and waits."""
    trainer_waits: float
    """Share of the time in which ranks had no step to train."""
    workers_wait: float
    """Share of the workers' time in which there was no room for what they had generated."""
    node_bytes_s: float
    """That leave a node, on average."""
    plane_bytes_s: float
    seconds: float
    """Simulated, after warming up."""
    num_puts: int
    num_steps: int


def simulate(cluster: Cluster, constants: Constants) -> Sized:
    """Run a cluster, and say how it did."""
    run = Simulation(cluster, constants)
    run.run()
    seen, seconds = run.seen, run.clock.now - run.seen.since
    busy = {
        "plane": _share([run.plane.busy]),
        "plane's disk": _share([run.log_disk.busy]),
        "keepers": _share([node.keeper.busy for node in run.nodes]),
        "disks": _share([node.disk.busy for node in run.nodes]),
        "network out": _share([node.sends.busy for node in run.nodes]),
        "network in": _share([node.receives.busy for node in run.nodes]),
    }
    first = max(busy, key=lambda name: busy[name].mean)
    tokens_s, trainer_waits = seen.tokens / seconds, max(1 - seen.trained_s / seconds, 0.0)
    return Sized(
        put_p50_s=_percentile(seen.puts, 50),
        put_p99_s=_percentile(seen.puts, 99),
        step_p50_s=_percentile(seen.steps, 50),
        step_p99_s=_percentile(seen.steps, 99),
        rank_step_p99_s=_percentile(seen.rank_steps, 99),
        tokens_s=tokens_s,
        offered_tokens_s=cluster.offered_tokens_s,
        busy=busy,
        first=first,
        headroom=1 / max(busy[first].mean, 1e-9),
        is_full=tokens_s < KEEPS_UP * cluster.offered_tokens_s and trainer_waits > 0.05,
        trainer_waits=trainer_waits,
        workers_wait=min(seen.no_room_s / (seconds * cluster.workers), 1.0),
        node_bytes_s=seen.network_bytes / seconds / cluster.nodes,
        plane_bytes_s=seen.plane_bytes / seconds,
        seconds=seconds,
        num_puts=len(seen.puts),
        num_steps=len(seen.steps),
    )


def _share(found: Sequence[Busy]) -> Share:
    shares = [one.share for one in found]
    return Share(mean=float(np.mean(shares)), most=max(shares))


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else float("nan")


def as_dict(cluster: Cluster, constants: Constants, sized: Sized) -> dict[str, Any]:
    """The answer for programs, with what it was computed from."""
    measured = {"date": constants.date, "machine": constants.machine}
    return {"cluster": asdict(cluster), "measured": measured, "answer": asdict(sized)}


def as_text(cluster: Cluster, constants: Constants, sized: Sized) -> str:
    """The answer for people."""
    lines = [
        f"{cluster.workers:,} workers, {cluster.ranks:,} ranks, {cluster.nodes:,} nodes, {cluster.copies} copies, "
        f"{cluster.groups_per_step:,} groups a step, samples of {cluster.tokens:,} tokens, {cluster.columns} columns",
        f"links of {cluster.link_bytes_s * 8e-9:g} Gbit/s; {sized.num_puts:,} puts and {sized.num_steps} steps in "
        f"{sized.seconds:.1f} simulated seconds",
        "",
        f"put        p50 {sized.put_p50_s * 1e3:.1f} ms   p99 {sized.put_p99_s * 1e3:.1f} ms",
        f"step       p50 {sized.step_p50_s:.2f} s   p99 {sized.step_p99_s:.2f} s",
        f"tokens/s   {sized.tokens_s / 1e6:.2f} M to the trainer, of {sized.offered_tokens_s / 1e6:.2f} M offered",
        f"waiting    trainer {_percent(sized.trainer_waits)}, workers {_percent(sized.workers_wait)} of their time",
        f"bytes      {sized.node_bytes_s / 1e6:.1f} MB/s leave a node, {sized.plane_bytes_s / 1e6:.2f} at the plane",
        "",
        f"{'busy':16}{'mean':>9}{'busiest':>9}",
        *(f"{name:16}{_percent(one.mean):>9}{_percent(one.most):>9}" for name, one in sized.busy.items()),
        "",
        _first(sized),
        f"Computed from constants measured {constants.date} on {constants.machine.get('cpu', 'a machine')}; links are "
        "given, not measured.",
    ]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _first(sized: Sized) -> str:
    if sized.is_full:
        done = sized.tokens_s / sized.offered_tokens_s
        return f"Full: {sized.first} is the busiest, and the trainer gets {done:.0%} of what is offered."
    if sized.trainer_waits <= 0.05 and sized.workers_wait > 0.05:
        return f"The trainer is the slowest; behind it {sized.first} is the busiest."
    return f"First to be full: {sized.first}, at about {sized.headroom:.1f} times this load, or sooner in bursts."


def as_svg(cluster: Cluster, sized: Sized) -> str:
    """How busy everything is, as bars: dark the mean, light the busiest."""
    width, left, row = 640, 130, 34
    title = (
        f"{cluster.workers:,} workers, {cluster.ranks:,} ranks, {cluster.nodes:,} nodes, {cluster.columns} columns: "
        f"put p99 {sized.put_p99_s * 1e3:.0f} ms, step p99 {sized.step_p99_s:.1f} s"
    )
    scale = width - left - 80
    parts = [f'<text x="12" y="24" font-size="14">{escape(title)}</text>']
    for at, (name, one) in enumerate(sized.busy.items()):
        y = 44 + at * row
        parts += [
            f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{y}" width="{scale}" height="22" fill="#f1f3f5"/>',
            f'<rect x="{left}" y="{y}" width="{scale * one.most:.1f}" height="22" fill="#a5d8ff"/>',
            f'<rect x="{left}" y="{y}" width="{scale * one.mean:.1f}" height="22" fill="#1971c2"/>',
            f'<text x="{left + scale + 8}" y="{y + 16}">{_percent(one.mean)}</text>',
        ]
    height = 56 + row * len(sized.busy)
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""])
