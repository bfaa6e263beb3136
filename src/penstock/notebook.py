"""Small HTML tables for objects in notebooks. Everything is escaped: names and ids come from rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_ROWS = 50


def html_table(title: object, rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Return a titled table. Shows the first `MAX_ROWS` rows and counts the others.

    >>> html_table("a < b", [("tokens", 1200)])
    '<table><caption>a &lt; b</caption><tbody><tr><td>tokens</td><td>1,200</td></tr></tbody></table>'
    """
    shown = list(rows)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in shown[:MAX_ROWS])
    if len(shown) > MAX_ROWS:
        body += f"<tr><td>and {len(shown) - MAX_ROWS:,} more</td></tr>"
    names = f"<thead><tr>{''.join(f'<th>{_cell(name)}</th>' for name in head)}</tr></thead>" if head else ""
    return f"<table><caption>{_cell(title)}</caption>{names}<tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    from html import escape  # only notebooks need its table of entities

    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))
