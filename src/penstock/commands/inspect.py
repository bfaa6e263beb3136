"""Show what a frame holds: its samples, its columns, how each is coded and how many bytes it takes.

penstock inspect group.frame
penstock inspect group.frame --json | jq .columns
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.encode.codings import NAMES
from penstock.encode.front import Front
from penstock.encode.layout import Block
from penstock.encode.reading import describe
from penstock.errors import InvalidInput

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a frame, as written by penstock.encode")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if not args.file.is_file():
        raise InvalidInput(f"{args.file}: not a file; give a frame, as written by penstock.encode")
    report = inspect_frame(args.file.read_bytes())
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0


def inspect_frame(data: bytes) -> dict[str, Any]:
    """What `penstock inspect` shows, as plain data."""
    front, samples, used = describe(data)
    codings = _codings(front)
    columns = [
        {
            "name": name,
            "coding": codings.get(name, "raw"),
            "dtype": samples.columns[name].values.dtype.str if name in samples.columns else None,
            "bytes": size,
            "bytes_per_token": round(size / max(samples.num_tokens, 1), 4),
        }
        for name, size in used.most_common()
    ]
    rows = zip(
        samples.ids,
        samples.text["group"],
        samples.text["env"],
        samples.lengths.tolist(),
        samples.loss_tokens.tolist(),
        samples.policy_versions.tolist(),
        strict=True,
    )
    keys = ("id", "group", "env", "tokens", "loss_tokens", "policy_version")
    return {
        "bytes": len(data),
        "samples": len(samples),
        "tokens": samples.num_tokens,
        "loss_tokens": int(samples.loss_tokens.sum()),
        "tokens_shared": front.header.num_shared,
        "bytes_per_token": round(len(data) / max(samples.num_tokens, 1), 4),
        "columns": columns,
        "rows": [dict(zip(keys, row, strict=True)) for row in rows],
    }


def _codings(front: Front) -> dict[str, str]:
    header = front.header
    named = {"lengths": header.lengths, "loss_tokens": header.loss_tokens, "policy_version": header.policy_versions}
    named |= {spec.name: spec.values for spec in (*header.head_columns, *header.body_columns)}
    found = {name: _name(block) for name, block in named.items()}
    found |= {text.name: f"{text.num_distinct} distinct" for text in header.text}
    shared = {spec.name for spec in header.body_columns if spec.shares_prefixes}
    return {name: coding + (" + shared prefixes" if name in shared else "") for name, coding in found.items()}


def _name(block: Block) -> str:
    name = NAMES[block.coding]
    if name in ("narrow", "packed"):
        name += f" {block.arg} bit"
    inner = [_name(part) for part in block.parts]
    return f"{name} ({', '.join(inner)})" if inner else name


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['samples']} samples, {report['tokens']:,} tokens ({report['loss_tokens']:,} trained, "
        f"{report['tokens_shared']:,} shared), {report['bytes']:,} bytes, {report['bytes_per_token']} B/token",
        "",
        f"{'column':<20}{'coding':<40}{'bytes':>12}{'B/token':>10}",
    ]
    lines += [f"{c['name']:<20}{c['coding']:<40}{c['bytes']:>12,}{c['bytes_per_token']:>10}" for c in report["columns"]]
    lines += ["", f"{'sample':<28}{'group':<20}{'env':<14}{'tokens':>8}{'trained':>9}{'version':>9}"]
    for row in report["rows"][:_SHOWN]:
        cells = [row[k].encode("unicode_escape").decode() for k in ("id", "group", "env")]
        lines.append(
            f"{cells[0]:<28}{cells[1]:<20}{cells[2]:<14}{row['tokens']:>8}{row['loss_tokens']:>9}{row['policy_version']:>9}"
        )
    if len(report["rows"]) > _SHOWN:
        lines.append(f"... and {len(report['rows']) - _SHOWN} more; --json lists all")
    return "\n".join(lines)
