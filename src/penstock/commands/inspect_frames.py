"""What a file of several frames holds: a line for each, and the sums."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.commands.tables import aligned, printable
from penstock.errors import CorruptFrame
from penstock.frames import decode, raw_frames

_SHOWN = 20
_COUNTS = ("samples", "tokens", "loss_tokens", "bytes")


def report_of(path: Path, *, as_json: bool) -> str:
    """What `penstock inspect` prints of the file."""
    frames = inspect_frames(path)
    sums = {name: sum(frame[name] for frame in frames) for name in _COUNTS}
    sums["bytes_per_token"] = round(sums["bytes"] / max(sums["tokens"], 1), 4)
    if as_json:
        columns = Counter(name for frame in frames for name in frame["columns"])
        return json.dumps({"frames": len(frames), **sums, "columns": dict(columns), "rows": frames}, indent=1)
    rows = [
        [str(i), printable(frame["group"]), *(f"{frame[name]:,}" for name in _COUNTS)]
        for i, frame in enumerate(frames[:_SHOWN])
    ]
    hidden = len(frames) - len(rows)
    return "\n".join(
        [
            f"{len(frames)} frames, {sums['samples']:,} samples, {sums['tokens']:,} tokens "
            f"({sums['loss_tokens']:,} trained), {sums['bytes']:,} bytes, {sums['bytes_per_token']} B/token",
            "",
            *aligned([["frame", "group", "samples", "tokens", "trained", "bytes"], *rows], left=2),
            *([f"... and {hidden} more; --json lists all"] if hidden else []),
        ]
    )


def inspect_frames(path: Path) -> list[dict[str, Any]]:
    """Each frame as plain data, one in memory at a time."""
    found: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, data in enumerate(raw_frames(file, name=str(path))):
            try:
                samples = decode(data)
            except CorruptFrame as error:
                raise CorruptFrame(f"{path} frame {number}: {error}") from None
            found.append(
                {
                    "group": samples.text["group"][0] if len(samples) else "",
                    "samples": len(samples),
                    "tokens": samples.num_tokens,
                    "loss_tokens": int(samples.loss_tokens.sum()),
                    "bytes": len(data),
                    "columns": list(samples.columns),
                }
            )
    return found
