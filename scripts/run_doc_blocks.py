"""Run every Python block of the documentation, so that no page shows what does not work.

    .venv/bin/python scripts/run_doc_blocks.py [PAGE ...]

The blocks of a page run from top to bottom in one namespace, in a folder of their own that is removed
afterwards. A block is left out when an HTML comment right above it says why:

    <!-- not run: needs two hosts -->
    <!-- file: trainer.py -->                      it is run as a file, by scripts/run_transcript.py

A failure names the page and the line.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"^( *)```(\w*)")
_NOT_RUN = re.compile(r"<!--\s*(?:not run|file):\s*(\S.*?)\s*-->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    line: int
    """Line of the page on which the code begins, from 1."""
    code: str
    reason: str
    """Why it is not run; empty when it is."""


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    """The Python blocks of a page.

    >>> [block.code for block in blocks("text\\n```python\\nx = 1\\n```\\n")]
    ['x = 1\\n']
    """
    lines = text.splitlines()
    at, above = 0, ""
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if not fence:
            above = lines[at] or above  # a blank line between comment and block is allowed
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), len(lines))
        if fence.group(2) == "python":
            code = "\n".join(line.removeprefix(fence.group(1)) for line in lines[at + 1 : end]) + "\n"
            comment = _NOT_RUN.search(above)
            yield Block(line=at + 2, code=code, reason=comment.group(1) if comment else "")
        at, above = end + 1, ""


def run_page(page: Path) -> tuple[int, int]:
    """(blocks run, blocks left out); raises what a block raises."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    done = skipped = 0
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.reason:
            skipped += 1
            continue
        # Blank lines in front make the line numbers of a traceback those of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        exec(code, namespace)
        done += 1
    return done, skipped


def main(names: list[str]) -> int:
    warnings.simplefilter("error")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    failed = False
    for page in [Path(name).resolve() for name in names] or pages():
        shown = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
        started, printed = time.perf_counter(), StringIO()
        try:
            with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(printed):
                done, skipped = run_page(page)
        except Exception as error:  # noqa: BLE001 - whatever a page raises is what we report
            line = next(
                (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(page)), 0
            )
            line = getattr(error, "lineno", None) or line
            print(f"{shown}:{line}: {type(error).__name__}: {error}", file=sys.stderr)
            failed = True
        else:
            left_out = f", {skipped} left out" if skipped else ""
            print(f"{shown}: {done} blocks{left_out}, {time.perf_counter() - started:.1f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
