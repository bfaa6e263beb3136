"""`penstock inspect` of a run's folder: its ledger, steps, groups and sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.commands.tables import aligned, ledger_line, over_length_line, reasons_line, size
from penstock.runs import read_run
from penstock.server import printable

_SHOWN = 20


def report(folder: Path, *, as_json: bool) -> str:
    """The text to print; `as_json` lists every step and every group."""
    if as_json:
        return json.dumps(read_run(folder), indent=1)
    return _text(read_run(folder, steps=_SHOWN, groups=_SHOWN))


def _text(found: dict[str, Any]) -> str:
    ledger = found["ledger"]
    files = ", ".join(f"{name} {size(count)}" for name, count in found["files"].items())
    lines = [
        f"run in {found['folder']}: epoch {found['epoch']}, session {found['session']}, next step "
        f"{found['next_step']}, policy version {found['policy_version']}",
        f"ledger     {ledger_line(ledger)}",
        f"trained    {ledger['uses']:,} uses of samples",
        f"discarded  {reasons_line(ledger['discarded'])} (before they were put)",
        *_too_long(ledger["over_length"]),
        f"groups     {found['num_groups']:,}, {found['num_tokens']:,} tokens; {found['held_groups']:,} held",
        f"bytes      {size(found['frame_bytes'])} of frames kept, {size(found['held_bytes'])} not yet trained; {files}",
    ]
    return "\n".join(printable(line) for line in [*lines, *_steps(found["steps"]), *_groups(found)])


def _too_long(counts: dict[str, int]) -> list[str]:
    return [f"too long   {over_length_line(counts)}"] if any(counts.values()) else []


def _steps(steps: list[dict[str, Any]]) -> list[str]:
    if not steps:
        return []
    head = ["step", "state", "groups", "samples", "tokens", "trained", "staleness", "digest of rank 0"]
    rows = [
        [
            f"{s['step']}",
            s["state"],
            f"{s['groups']}",
            f"{s['samples']:,}",
            f"{s['tokens']:,}",
            f"{s['loss_tokens']:,}",
            f"{s['staleness']['mean']:.1f}, at most {s['staleness']['max']}",
            s["digests"][0][:16] if s["digests"] else "",
        ]
        for s in steps
    ]
    first = steps[0]["step"]
    more = [f"... and the steps before {first}; --json lists all"] if first > 1 else []
    return ["", *aligned([head, *rows], left=2), *more]


def _groups(found: dict[str, Any]) -> list[str]:
    groups = found["groups"]
    if not groups:
        return []
    head = ["group", "state", "samples", "tokens", "bytes", "version", "uses"]
    rows = [
        [
            printable(g["id"])[:60],
            f"{g['state']} ({g['reason']})" if g["reason"] else g["state"],
            f"{g['samples']}",
            f"{g['tokens']:,}",
            f"{g['size']:,}",
            f"{g['policy_version']}",
            f"{g['uses']}",
        ]
        for g in groups
    ]
    hidden = found["num_groups"] - len(groups)
    more = [f"... and {hidden:,} groups before them; --json lists all"] if hidden else []
    return ["", *aligned([head, *rows], left=2), *more]
