"""Addresses of logs in PostgreSQL, postgresql://USER@HOST/DATABASE#RUN, without secrets; and text that is no address.

A password in an address would end up in process lists, settings, errors and the log itself. So addresses with one are
rejected: libpq finds the password in PGPASSWORD, in the file that PGPASSFILE names, or in a service file.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import xxhash

from penstock.errors import ConfigError

SCHEMES = ("postgresql://", "postgres://")
_SECRETS = ("password", "sslpassword")
_WHERE_TO = (
    "put it in PGPASSWORD, in a password file (PGPASSFILE, by default ~/.pgpass), or in a service file (PGSERVICEFILE, "
    "with postgresql://?service=NAME)"
)
_MAX_NAME = 40
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}")


def check_where(where: str) -> None:
    """Reject text that would be taken for a folder by mistake. The empty path means the current folder."""
    if not where:
        raise ConfigError("'': empty; was a shell variable unset? Give . for the current folder")
    if _HOST_AND_PORT.fullmatch(where):
        raise ConfigError(
            f"{where}: neither a folder nor an address; give 'tcp://{where}', or './{where}' for a folder"
        )


def is_postgres(address: str) -> bool:
    return address.startswith(SCHEMES)


def redacted(address: str) -> str:
    """Return an address without its secrets, to be shown.

    >>> redacted("postgresql://me:secret@host/db?sslpassword=x")
    'postgresql://me:***@host/db?sslpassword=***'
    """
    shown = re.sub(r"(//[^/?#]*?):[^/?#]*@", r"\1:***@", address)
    return re.sub(r"((?:ssl)?password=)[^&#]*", r"\1***", shown, flags=re.IGNORECASE)


def check_address(address: str) -> None:
    """Raise ConfigError unless this is the address of a database without a password."""
    if not is_postgres(address):
        raise ConfigError(
            f"log: {redacted(address)!r}; give postgresql://USER@HOST/DATABASE, or leave it out for SQLite"
        )
    if "#" in address:
        raise ConfigError(f"log: {redacted(address)!r}: contains a #; give the run's name in the setting `run`")
    try:
        parts = urlsplit(address)
        secret = parts.password is not None
        secret |= any(name.lower() in _SECRETS for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    except ValueError:
        raise ConfigError(f"log: {redacted(address)!r}: not an address; give postgresql://USER@HOST/DATABASE") from None
    if secret:
        raise ConfigError(f"log: {redacted(address)}: contains a password, which others can see; {_WHERE_TO}")


def with_run(address: str, run: str) -> str:
    """Return the address of one run's log.

    >>> with_run("postgresql://host/db", "exp 7"), split_run("postgresql://host/db#exp%207")
    ('postgresql://host/db#exp%207', ('postgresql://host/db', 'exp 7'))
    """
    return f"{address}#{quote(run)}"


def split_run(address: str) -> tuple[str, str]:
    """Return the database's address and the run's name."""
    base, _, run = address.partition("#")
    return base, unquote(run) or "run"


def schema_of(run: str) -> str:
    """Return the schema that holds a run's tables. Names with other characters than a-z, 0-9, _ get part of their hash.

    >>> schema_of("exp_7"), schema_of("Exp 7")
    ('penstock_exp_7', 'penstock_exp_7_8b6d410c')
    """
    plain = re.sub(r"[^a-z0-9_]", "_", run.lower())[:_MAX_NAME]
    return f"penstock_{plain}" if plain == run else f"penstock_{plain}_{xxhash.xxh3_64_hexdigest(run.encode())[:8]}"


def lock_of(schema: str) -> int:
    """Return the number of the advisory lock that a plane holds while it has a run open."""
    # Advisory locks are signed 64-bit numbers; the shift drops a bit and keeps it positive.
    return xxhash.xxh3_64_intdigest(schema.encode()) >> 1
