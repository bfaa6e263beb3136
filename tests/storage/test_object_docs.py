"""docs/object-storage.md: its policies are what planes, producers and ranks need, and what it quotes is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "object-storage.md").read_text()
SOURCES = Path(__file__).parents[2] / "src" / "penstock" / "storage"


def policies() -> dict[str, dict[str, Any]]:
    found = re.findall(r"(The plane|A producer|A rank):\n\n```json\n(.*?)```", PAGE, re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def rights(policy: dict[str, Any]) -> dict[str, set[str]]:
    """Action -> resources."""
    found: dict[str, set[str]] = {}
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow" and statement.keys() <= {"Effect", "Action", "Resource", "Condition"}
        actions, resources = statement["Action"], statement["Resource"]
        for action in [actions] if isinstance(actions, str) else actions:
            found.setdefault(action, set()).update([resources] if isinstance(resources, str) else resources)
    return found


def test_policies_give_each_what_it_needs_and_no_more() -> None:
    found = policies()
    assert all(policy["Version"] == "2012-10-17" for policy in found.values())
    bucket = "arn:aws:s3:::BUCKET"
    below = f"{bucket}/PREFIX/*"
    assert rights(found["The plane"]) == {
        "s3:GetObject": {below},
        "s3:PutObject": {below},
        "s3:DeleteObject": {below},
        "s3:ListBucket": {bucket},
    }
    assert rights(found["A producer"]) == {
        "s3:PutObject": {f"{bucket}/PREFIX/segments/*"},
        "s3:GetObject": {f"{bucket}/PREFIX/marker"},
    }
    assert rights(found["A rank"]) == {
        "s3:GetObject": {f"{bucket}/PREFIX/segments/*", f"{bucket}/PREFIX/marker"},
    }


def test_what_the_page_quotes_is_what_is_said() -> None:
    sources = "".join(path.read_text() for path in SOURCES.glob("object*.py"))
    table = PAGE.split("| the plane says | what to do |")[1].split("\n## ")[0]
    quoted = [words.replace(" (403 ...)", "") for words in re.findall(r"`([a-z][^`]+)`", table) if " " in words]
    assert len(quoted) >= 7
    assert [words for words in quoted if words not in sources] == []
