"""What token ids look like as text: read from a tokenizer's files, one piece per id, nothing decoded twice.

`tokenizer.json` is read as the data it is: no library, no code from the folder. Other tokenizers are opened by
transformers, from local files only and without remote code, if it is installed. A piece that is part of a character
shows its bytes, `\\xe2\\x82`, because alone it is not text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.errors import ConfigError, CorruptFile

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Vocabulary(Protocol):
    def text(self, token_id: int) -> str | None:
        """The text of one id; None for ids it does not have."""


class Pieces:
    """A vocabulary by id.

    >>> Pieces({5: "Ġhello", 6: "▁hello", 7: "âĤ", 8: "<0x0A>"}).text(5)
    ' hello'
    """

    def __init__(self, pieces: dict[int, str], plain: frozenset[int] = frozenset()) -> None:
        self._pieces = pieces
        self._plain = plain
        """Ids of added tokens: written as they are, in no alphabet of bytes."""

    def text(self, token_id: int) -> str | None:
        piece = self._pieces.get(token_id)
        if piece is None or token_id in self._plain:
            return piece
        return piece_text(piece)


def open_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of the tokenizer in a folder."""
    path = folder if folder.suffix == ".json" else folder / "tokenizer.json"
    if path.is_file():
        return _from_json(path)
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{folder}: no tokenizer.json in it; install transformers for other tokenizers") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: not a tokenizer's folder: {error}") from None
    return Pieces({index: piece for piece, index in tokenizer.get_vocab().items()})


def _from_json(path: Path) -> Pieces:
    try:
        data = msgspec.json.decode(path.read_bytes())
        found = data["model"]["vocab"]
        listed = found.items() if isinstance(found, dict) else ((piece, i) for i, (piece, *_) in enumerate(found))
        pieces = {int(index): str(piece) for piece, index in listed}
        added = {int(token["id"]): str(token["content"]) for token in data.get("added_tokens", [])}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path}: not a tokenizer.json: {error}") from None
    return Pieces({**pieces, **added}, frozenset(added))


def piece_text(piece: str) -> str:
    """A vocabulary entry as text: byte alphabets undone, SentencePiece's marks as spaces."""
    match = _BYTE_PIECE.fullmatch(piece)
    if match:
        return _decoded(bytes.fromhex(match[1]))
    if all(char in _BYTES for char in piece):
        return _decoded(bytes(_BYTES[char] for char in piece))
    return piece.replace(_SPACE, " ")


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones are themselves, the others are moved up from 256."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTES = _byte_alphabet()


def texts(vocabulary: Vocabulary, ids: Any) -> dict[int, str]:
    """The text of every distinct id that has one."""
    found = ((int(i), vocabulary.text(int(i))) for i in set(ids))
    return {i: _whole(text) for i, text in found if text is not None}


def _whole(text: str) -> str:
    """The text with lone surrogates replaced: they cannot be sent as UTF-8."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
