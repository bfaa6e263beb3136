"""Where a conversion reads and writes: a file, a folder, standard input or output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.atomic import replacing
from penstock.errors import InvalidInput

STANDARD = "-"
MAX_LINE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Place:
    """A path, or `-` for the standard stream."""

    word: str

    @property
    def is_stream(self) -> bool:
        return self.word == STANDARD

    @property
    def name(self) -> str:
        """How errors name it."""
        return "standard input" if self.is_stream else self.word

    @property
    def short(self) -> str:
        """A name for records that have none of their own."""
        return "stdin" if self.is_stream else self.path.name

    @property
    def path(self) -> Path:
        """The path; InvalidInput for a stream, which formats that seek cannot use."""
        if self.is_stream:
            raise InvalidInput(f"{self.word}: this format is not read or written as a stream; give a file")
        return Path(self.word)

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        if self.is_stream:
            yield sys.stdin.buffer
            return
        if self.path.is_dir():
            raise InvalidInput(f"{self.word}: a folder; give a file, or say what the folder is with --from")
        with self.path.open("rb") as file:
            yield file

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """A file that takes its name when it is complete, or standard output."""
        if self.is_stream:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
            return
        if self.path.is_dir():
            raise InvalidInput(f"{self.word}: a folder; name a file to write")
        if not self.path.parent.is_dir():
            raise InvalidInput(f"{self.word}: there is no folder {self.path.parent}; make it first")
        with replacing(self.path) as file:
            yield file


def lines_of(file: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Each line that is not empty, with its place for errors: `file:line`, lines from 1."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise InvalidInput(f"{name}:{number}: longer than {MAX_LINE_BYTES} bytes; one record is one line")
        if line.strip():
            yield f"{name}:{number}", line
