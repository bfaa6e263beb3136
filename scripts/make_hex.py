"""Write the hex dump of the example into docs/internals/wire-format.md, from the real encoder.

.venv/bin/python scripts/make_hex.py            write it
.venv/bin/python scripts/make_hex.py --check    exit 1 when the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import penstock as ps

PAGE = Path(__file__).parent.parent / "docs" / "internals" / "wire-example.md"
START, END = "<!-- hex: made by scripts/make_hex.py -->", "<!-- end of hex -->"


def dump(frame: bytes) -> str:
    """Sixteen bytes a line, with the offset in front."""
    return "\n".join(f"{at:04x}  {frame[at : at + 16].hex(' ')}" for at in range(0, len(frame), 16))


def updated(page: str) -> str:
    """The page with the bytes that the encoder writes today."""
    columns: dict[str, Any] = {"loss_mask": [0, 1, 1], "logprobs": [0.0, -0.5, -0.25], "rewards": 1.0}
    sample = ps.Sample(id="a", policy_version=0, token_ids=[5, 6, 7], **columns)
    before, rest = page.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n```text\n{dump(ps.encode([sample]))}\n```\n{END}{after}"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = updated(page)
    if "--check" in arguments:
        if new != page:
            print(f"{PAGE.name}: the hex dump is out of date; run scripts/make_hex.py", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
