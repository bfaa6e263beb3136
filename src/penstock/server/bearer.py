"""Who may read a page over HTTP: an address says whether other hosts can reach it, a token says who may."""

from __future__ import annotations

import ipaddress
import secrets
from pathlib import Path

from penstock.errors import ConfigError

MIN_TOKEN = 22
"""Characters, which hold 128 bits."""


def parse_address(address: str, setting: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; `setting` is the one that has it.

    >>> parse_address("localhost:7441", "http"), parse_address("[::1]:80", "http")
    (('127.0.0.1', 7441), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        ipaddress.ip_address(host)
        good = port.isdigit() and int(port) <= 65535
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{setting}: {address!r}; must be ADDRESS:PORT, such as 127.0.0.1:7441")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach an address."""
    return ipaddress.ip_address(host).is_loopback


def read_token(path: Path, setting: str) -> str:
    """The token that a file holds, which nobody else may read."""
    try:
        token = path.read_text(encoding="ascii").strip()
        mode = path.stat().st_mode & 0o777
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", error)
        raise ConfigError(f"{setting}: {path}: {words}; give a file with a token") from None
    if mode & 0o077:
        raise ConfigError(f"{setting}: {path}: others may read it (mode {mode:o}); chmod 600 {path}")
    if len(token) < MIN_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(f"{setting}: {path}: {len(token)} characters; give at least {MIN_TOKEN}, without spaces")
    return token


def has_token(authorization: str, token: str) -> bool:
    """Whether an Authorization header carries the token; how long it takes does not say where they differ."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), token.encode())
