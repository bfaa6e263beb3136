"""Settings as given: nested tables as in TOML, with the origin of each key, so that an error can name it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.setting import NONE, settings_of
from penstock.errors import ConfigError

COMMAND_LINE = "the command line"


@dataclass(slots=True)
class Given:
    """Settings before they are checked."""

    tables: dict[str, Any] = field(default_factory=dict)
    where: str = COMMAND_LINE
    """Where the tables came from: a file, or an address."""
    assigned: set[str] = field(default_factory=set)
    """Paths given on the command line, which win over the file."""
    names: dict[str, str] = field(default_factory=dict)
    """Path -> the caller's name for it, if that differs: a keyword argument, a flag."""

    @staticmethod
    def read(path: str | Path, *, hint: str, paths_of: type[Any] | None = None) -> Given:
        """Read a TOML file. `hint` is appended to errors and says how to write one.

        `paths_of` is a record: those of its settings that are relative paths start at the file's folder.
        """
        import tomllib  # most processes read no file

        file = Path(path)
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}; {hint}") from None
        except (ValueError, RecursionError) as error:  # the latter for lists within lists
            raise ConfigError(f"{file}: not TOML: {error}; {hint}") from None
        for setting in () if paths_of is None else settings_of(paths_of):
            value = tables.get(setting.name)
            if not setting.extra.get("path") or not isinstance(value, str) or "://" in value:
                continue
            if value not in ("", NONE, "memory:"):
                tables[setting.name] = str(file.resolve().parent / value)
        return Given(tables, str(file))

    def assign(self, text: str) -> None:
        """Set one key from `path.to.key=value`, the value as in TOML; text needs no quotes."""
        path, equals, value = text.partition("=")
        if not equals or not all(path.strip().split(".")):
            raise ConfigError(f"--set {text!r}: must be KEY=VALUE, for example --set timeouts.peer_s=5")
        self.set(path.strip(), toml_value(value))

    def set(self, path: str, value: Any) -> None:
        """Set one key by its path, as given on the command line."""
        *parents, name = path.split(".")
        tables = self.tables
        for parent in parents:
            tables = tables.setdefault(parent, {})
            if not isinstance(tables, dict):
                raise ConfigError(f"--set {path}: {parent} is a value, not a table; set {parent} itself")
        tables[name] = value
        self.assigned.add(path)

    def name(self, path: str) -> str:
        """Return the caller's name for a path."""
        if path in self.names:
            return self.names[path]
        table, dot, last = path.rpartition(".")
        return f"{self.name(table)}.{last}".lstrip(".") if dot else path

    def origin(self, path: str) -> str:
        """Return the origin of the value at a path, or of the table at it.

        With a file that has [timeouts] and `--set timeouts.peer_s=5`: "timeouts.peer_s" is from the command line, the
        table "timeouts" from both, "run" from the file.
        """
        below = {
            key for key in self.assigned if key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.")
        }
        if not below or self.where == COMMAND_LINE:
            return self.where
        return COMMAND_LINE if path in below or path.rpartition(".")[0] in below else f"{self.where} and {COMMAND_LINE}"


def toml_value(text: str) -> Any:
    """Parse a value as TOML; anything else is text without quotes."""
    import tomllib

    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text.strip()
