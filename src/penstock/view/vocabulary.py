"""Show token ids as text, from a tokenizer's files, one piece per id.

`tokenizer.json` is read as data, without a library or code from the folder. Other tokenizers are opened by
transformers, if installed, from local files only and without remote code. A piece that is part of a character is shown
as bytes, `\\xe2\\x82`, because alone it is not valid text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError, CorruptFile

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Vocabulary:
    """The texts of token ids.

    >>> Vocabulary({5: "Ġhello", 6: "▁hello", 7: "âĤ", 8: "<0x0A>"}).text(5)
    ' hello'
    """

    def __init__(self, pieces: dict[int, str], plain: frozenset[int] = frozenset()) -> None:
        self._pieces = pieces
        self._plain = plain
        """Ids of added tokens, which are plain text instead of a byte alphabet."""

    def text(self, token_id: int) -> str | None:
        """Return the text of an id, None for unknown ids."""
        piece = self._pieces.get(token_id)
        if piece is None or token_id in self._plain:
            return piece
        return piece_text(piece)


def open_vocabulary(folder: Path) -> Vocabulary:
    """Open the vocabulary of the tokenizer in a folder."""
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
    return Vocabulary({index: piece for piece, index in tokenizer.get_vocab().items()})


def _from_json(path: Path) -> Vocabulary:
    try:
        data = msgspec.json.decode(path.read_bytes())
        found = data["model"]["vocab"]
        listed = found.items() if isinstance(found, dict) else ((piece, i) for i, (piece, *_) in enumerate(found))
        pieces = {int(index): str(piece) for piece, index in listed}
        added = {int(token["id"]): str(token["content"]) for token in data.get("added_tokens", [])}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path}: not a tokenizer.json: {error}") from None
    return Vocabulary({**pieces, **added}, frozenset(added))


def piece_text(piece: str) -> str:
    """Convert a vocabulary entry to text: decodes byte alphabets and SentencePiece's space marks."""
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
    """Return GPT-2's characters for bytes: printable ones map to themselves, the others to 256 and up."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTES = _byte_alphabet()


def texts(vocabulary: Vocabulary, ids: Any) -> dict[int, str]:
    """Return the text of every distinct id that has one."""
    found = ((int(i), vocabulary.text(int(i))) for i in set(ids))
    return {i: _encodable(text) for i, text in found if text is not None}


def _encodable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
