"""Watch a running plane: rates, buffer, staleness, what waits for what, the state of every sample.

  penstock top tcp://127.0.0.1:7440            a live page; Ctrl-C ends it
  penstock top ray://demo                      the same, for a plane in this host's Ray cluster
  penstock top runs/demo                       the same from a run's folder, read-only; works without a running plane
  penstock top tcp://127.0.0.1:7440 --once     print once, as text
  penstock top runs/demo --json                print once, as one JSON object

Rates are averages between two updates. Without a terminal, updates are printed as text, one after another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.commands import tenants
from penstock.commands.terminal import masked_line, reasons_line, size
from penstock.commands.which_run import RUN_HELP, asking, checked_where, is_address, plane_folder
from penstock.errors import InvalidInput
from penstock.plane import Ledger
from penstock.protocol import over_length_text
from penstock.server import printable, redraws

Look = Callable[[], dict[str, Any]]
_CLEAR = "\x1b[H\x1b[J"
_RATES = (("groups", "groups/s"), ("samples", "samples/s"), ("tokens", "tokens/s"), ("steps", "steps/s"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN", type=checked_where, help=RUN_HELP)
    parser.add_argument("--once", action="store_true", help="print once, as text")
    parser.add_argument("--json", action="store_true", help="print once, as one JSON object")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default 1)")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")


def run(args: argparse.Namespace) -> int:
    if not 0.05 <= args.interval < 3600:
        raise InvalidInput(f"--interval {args.interval}: must be from 0.05 s to an hour")
    with suppress(KeyboardInterrupt), looking(args.where, args.keys) as look:
        if args.json:
            print(json.dumps(look(), indent=1))
        elif args.once:
            print("\n".join(page(look(), {})))
        else:
            _watch(look, args.interval)
    return 0


@contextmanager
def looking(where: str, keys: Path | None = None) -> Iterator[Look]:
    """Yield a function that returns the current state of a plane or a folder."""
    if is_address(where):
        with asking(where, keys) as plane:
            yield lambda: _from_plane(plane.status())
    else:
        from penstock.runs import read_run

        folder = plane_folder(where)
        yield lambda: _from_folder(read_run(folder, steps=1, groups=0))


def _from_plane(status: dict[str, Any]) -> dict[str, Any]:
    metrics = status["metrics"]
    totals = {name: metrics[f"gen/{key}"] for name, key in (("groups", "items"), ("tokens", "tokens"))}
    totals |= {"samples": status["ledger"]["accepted"], "steps": status["next_step"] - 1}
    staleness = {"mean": metrics["train/staleness_mean"], "max": metrics["train/staleness_max"]}
    return {"source": "plane", "totals": totals, "staleness": staleness} | status


def _from_folder(found: dict[str, Any]) -> dict[str, Any]:
    totals = {"groups": found["num_groups"], "samples": found["ledger"]["accepted"], "tokens": found["num_tokens"]}
    last = found["steps"][-1]["staleness"] if found["steps"] else {"mean": 0.0, "max": 0}
    names = ["folder", "epoch", "session", "next_step", "policy_version", "ledger", "files"]
    names += ["held_groups", "held_bytes"]
    return {
        "source": "folder",
        "totals": totals | {"steps": found["next_step"] - 1},
        "staleness": {"mean": last["mean"], "max": last["max"]},
        **{name: found[name] for name in names},
    }


def rates(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return rates per second between two states of the same plane; empty if the plane was restarted."""
    if before.get("epoch") != after["epoch"] or seconds <= 0:
        return {}
    return {name: (after["totals"][name] - before["totals"][name]) / seconds for name, _ in _RATES}


def page(now: dict[str, Any], speed: dict[str, float]) -> list[str]:
    """Format a state as lines of text."""
    totals, ledger, staleness = now["totals"], now["ledger"], now["staleness"]
    where = f"run {now['run']!r}" if now["source"] == "plane" else f"folder {now['folder']}"
    rate = "   ".join(f"{speed[name]:,.1f} {unit}" for name, unit in _RATES) if speed else "known after the next update"
    held = f"{now['held_groups']:,} groups, {size(now['held_bytes'])} not yet trained"
    if "max_held_bytes" in now:
        held += f" of {size(now['max_held_bytes'])} ({100 * now['held_bytes'] / now['max_held_bytes']:.0f} %)"
    lines = [
        f"{where}: epoch {now['epoch']}, session {now['session']}, next step {now['next_step']}, policy version "
        f"{now['policy_version']}",
        f"rates      {rate}",
        f"so far     {totals['groups']:,} groups, {totals['samples']:,} samples, {totals['tokens']:,} tokens, "
        f"{totals['steps']:,} steps",
        f"buffer     {held}",
        f"staleness  {staleness['mean']:.2f} mean, {staleness['max']:g} at most, in policy versions",
        *_generated(now),
        *_bias(now.get("metrics", {})),
        f"waiting    {_waiting(now)}",
        f"ledger     {Ledger.from_dict(ledger)}",
        f"discarded  {reasons_line(ledger['discarded'])}",
    ]
    lines += [f"tasks      {_tasks(name, tasks)}" for name, tasks in now.get("tasks", {}).items()]
    if now.get("storage"):
        lines.append(f"storage    {_storage(now)}")
    if any(now.get("slow", {}).get("counts", {}).values()):
        lines.append(f"slow       {_slow(now['slow'])}")
    if any(ledger["over_length"].values()):
        lines.append(f"too long   {over_length_text(ledger['over_length'])}")
    if any(ledger["masked"].values()):
        lines.append(masked_line(ledger["masked"]))
    if now.get("retain") == "all":
        lines.append("retain     all: this run frees nothing")
    if now.get("tenants"):
        lines += [f"{'tenants' if i == 0 else '':11}{line}" for i, line in enumerate(tenants.table(now["tenants"]))]
    if now.get("envs"):
        found = tenants.table(now["envs"], "environment")
        lines += [f"{'envs' if i == 0 else '':11}{line}" for i, line in enumerate(found)]
    if now["source"] == "plane":
        refused = {name: n for name, n in now["counts"].items() if name not in ("groups", "samples", "tokens")}
        lines.append(f"events     {reasons_line(refused)}")
    else:
        lines.append(f"files      {', '.join(f'{name} {size(n)}' for name, n in now['files'].items())}")
    return [printable(line) for line in lines]


def _generated(now: dict[str, Any]) -> list[str]:
    """Summarize the rollouts put before the last step; empty if unknown."""
    metrics = now.get("metrics", {})
    if not metrics.get("gen/samples"):
        return []
    forms = {
        "reward": "reward {:.3f}",
        "length": "{:,.0f} tokens",
        "truncated": "{:.0%} truncated",
        "seconds": "{:.1f} s",
    }
    found = [form.format(metrics[f"gen/{name}"]) for name, form in forms.items() if f"gen/{name}" in metrics]
    return [f"generated  {', '.join(found)}: means of {metrics['gen/samples']:,.0f} samples put before the last step"]


def _bias(metrics: dict[str, float]) -> list[str]:
    """Say how what is trained differs from what was put; empty if unknown."""
    forms = {"length_bias": "length {:+.1%}", "reward_bias": "reward {:+.3f}"}
    found = [form.format(metrics[f"train/{name}"]) for name, form in forms.items() if f"train/{name}" in metrics]
    return [f"bias       {', '.join(found)}: trained against put, since the run began"] if found else []


def _waiting(now: dict[str, Any]) -> str:
    """Say what waits for what."""
    if now["source"] == "folder":
        return "not known from a folder; give the plane's address"
    if now["phase"] == "failed":
        return "every rank for the trainer to be restarted; the session failed"
    if now["phase"] in ("forming", "rejoining"):
        return f"the plane for {now['waiting_for']}"
    who = "producers and plane" if now["waiting_for"] == "the trainer" else "ranks"
    text = f"{who} for {now['waiting_for']}"
    if now.get("producers_waiting"):
        text += f"; {now['producers_waiting']:,} puts for room, the first for {now['oldest_wait_s']:.0f} s"
    return text


def _tasks(name: str, tasks: dict[str, Any]) -> str:
    """Say how far a list of prompts is, and what it waits for."""
    where = f"{name!r}: epoch {tasks['epoch']} of {tasks['epochs']}, {tasks['left']:,} to hand out"
    under_way = f"{tasks['leased']:,} leased, {tasks['held']:,} held, {tasks['trained']:,} trained"
    dropped = f", dropped: {reasons_line(tasks['dropped'])}" if tasks["dropped"] else ""
    end = "; all done" if tasks["ended"] else f"; waits for {tasks['waiting_for']}" if tasks["waiting_for"] else ""
    return f"{where}, {under_way}{dropped}{end}"


def _storage(now: dict[str, Any]) -> str:
    """Summarize storage: what it holds, its writers, and problems that need an operator."""
    found = now["storage"]
    parts = [f"{size(found['live_bytes'])} in use, {size(found['dead_bytes'])} dead", f"{found['writers']} writers"]
    if signed := now["counts"].get("urls_signed"):
        parts.append(f"{signed:,} URLs signed for them")
    if found["to_delete"]:
        parts.append(f"{found['to_delete']:,} deletions pending")
    if found["missing"]:
        parts.append(f"{len(found['missing'])} segments MISSING")
    if found.get("keeps"):
        parts.append(f"nothing is DELETED: {found['keeps']}")
    if found["unregistered"]:
        parts.append(f"{len(found['unregistered'])} UNKNOWN segments, nothing is deleted: see `penstock storage check`")
    inline = now.get("inline_ranks") or {}
    if inline:
        parts.append(f"cannot read it: {', '.join(sorted(inline)[:8])}")
    return ", ".join(parts)


def _slow(found: dict[str, Any]) -> str:
    """Summarize turns, commits and writes that took too long: how many, and the last one."""
    counts = ", ".join(f"{count:,} {work}s" for work, count in found["counts"].items() if count)
    last = found["last"][-1]
    doing = f" ({last['doing']})" if last["doing"] else ""
    when = time.strftime("%H:%M:%S", time.localtime(last["at"]))
    above = f"{found['above_s'] * 1e3:.0f} ms"
    return f"{counts} above {above}; the last at {when}: {last['work']} {last['seconds'] * 1e3:,.0f} ms{doing}"


def _watch(look: Look, interval: float) -> None:
    before: dict[str, Any] = {}
    then = time.monotonic()
    with _screen() as show:
        while True:
            now, at = look(), time.monotonic()
            show(page(now, rates(before, now, at - then)))
            before, then = now, at
            time.sleep(max(0.0, at + interval - time.monotonic()))


def _plain(lines: list[str]) -> None:
    print("\n".join([*lines, ""]), flush=True)


@contextmanager
def _screen() -> Iterator[Callable[[list[str]], None]]:
    """Yield a function that shows a page: redrawn on a terminal, with rich if installed; otherwise printed."""
    if not redraws(sys.stdout):
        yield _plain
        return
    try:
        from rich.live import Live
        from rich.panel import Panel
        from rich.text import Text
    except ImportError:
        yield lambda lines: _plain([f"{_CLEAR}{lines[0]}", *lines[1:]])
        return

    def panel(lines: list[str]) -> Panel:
        text = Text("\n".join(lines[1:]))
        text.highlight_regex(r"(?m)^(so far|\w+)", "cyan")
        text.highlight_words(["NOT BALANCED", "failed"], "bold red")
        return Panel(text, title=Text(lines[0]), title_align="left")

    with Live(auto_refresh=False) as live:
        yield lambda lines: live.update(panel(lines), refresh=True)
