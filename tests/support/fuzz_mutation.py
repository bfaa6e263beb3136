"""Changing inputs by their structure: a tree of lists and numbers stays a tree, bytes inside it change as bytes.

A fuzzer that flips bytes of a checksummed frame never gets past the checksum. So an input is taken apart, one thing
in it is changed, and it is put together again with sizes and checksums that fit.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

Change: TypeAlias = Callable[[bytes], bytes]
"""Changes bytes that have no structure: the fuzzer's own mutator, or `change_bytes`."""

NUMBERS = (0, 1, -1, 2, 3, 7, 8, 63, 64, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.5, -1.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "x", "a/0", "../../secret", "\x00", "\x1b[2J", "\ud800", "\u202e", "é" * 300, "x" * 3000)


def change_bytes(rng: Random, data: bytes) -> bytes:
    """Flip, overwrite, delete, insert or repeat a few bytes."""
    out = bytearray(data or b"\0")
    at, size = rng.randrange(len(out)), rng.choice([1, 2, 4, 8, 64])
    kind = rng.randrange(5)
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[at : at + size] = rng.choice([b"\0", b"\xff", b"\x80", b"\x7f", rng.randbytes(1)]) * size
    elif kind == 2:
        del out[at : at + size]
    elif kind == 3:
        out[at:at] = rng.randbytes(size)
    else:
        out[at:at] = out[at : at + size]
    return bytes(out)


def change_tree(rng: Random, node: Any, change: Change) -> Any:
    """The same tree with one thing in it replaced, repeated, removed or moved."""
    if isinstance(node, list) and node and rng.random() < 0.95:
        return _change_list(rng, node, change)
    if isinstance(node, dict) and node and rng.random() < 0.95:
        return _change_dict(rng, node, change)
    return _change_leaf(rng, node, change)


def _change_list(rng: Random, node: list[Any], change: Change) -> list[Any]:
    at, other = rng.randrange(len(node)), rng.choice(node)
    kind = rng.randrange(12)
    if kind == 0:
        return node[:at] + node[at + 1 :]
    if kind == 1:
        return [*node[:at], other, *node[at:]]
    if kind == 2:
        return [*node[:at], other, *node[at + 1 :]]
    if kind == 3 and len(node) < 64:
        return [*node, *node]
    return [*node[:at], change_tree(rng, node[at], change), *node[at + 1 :]]


def _change_dict(rng: Random, node: dict[Any, Any], change: Change) -> dict[Any, Any]:
    key = rng.choice(list(node))
    kind = rng.randrange(8)
    if kind == 0:
        return {name: value for name, value in node.items() if name != key}
    if kind == 1:
        return {**node, rng.choice(TEXTS[:4]): node[key]}
    return {**node, key: change_tree(rng, node[key], change)}


def _change_leaf(rng: Random, node: Any, change: Change) -> Any:
    if isinstance(node, bytes) and rng.random() < 0.9:
        return change(node)
    if isinstance(node, bool) and rng.random() < 0.8:
        return not node
    if isinstance(node, int) and rng.random() < 0.9:
        return rng.choice([*NUMBERS, node + 1, node - 1, node * 2, node ^ (1 << rng.randrange(40))])
    if isinstance(node, float) and rng.random() < 0.9:
        return rng.choice([*FLOATS, -node, node * 2])
    if isinstance(node, str) and rng.random() < 0.9:
        return rng.choice([*TEXTS, node + "x", node[:-1], node * 2])
    return rng.choice([*NUMBERS, *FLOATS, *TEXTS[:4], None, True, [], [[]], b"", {}])
