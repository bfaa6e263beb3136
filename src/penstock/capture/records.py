"""Read records of other programs, given as mappings (JSON, msgpack) or as objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import COLUMNS, Array, coerce
from penstock.errors import InvalidInput


class Absent:
    """The type of `ABSENT`: a field that does not exist, as opposed to one that is None."""

    def __repr__(self) -> str:
        return "missing"


ABSENT: Final = Absent()


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put the position of a record before the message of an InvalidInput that its reader raises in the block."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def field_of(record: Any, name: str, default: Any = None) -> Any:
    """Return a field of a mapping or an attribute of an object."""
    if isinstance(record, Mapping):
        return record.get(name, default)
    return getattr(record, name, default)


def required(record: Any, name: str, where: str) -> Any:
    """Return a field that must exist and not be None."""
    value = field_of(record, name, ABSENT)
    if value is None or value is ABSENT:
        raise InvalidInput(f"{where}.{name}: {value}; every turn of a rollout must have it")
    return value


def list_of(record: Any, name: str, where: str) -> Sequence[Any]:
    """Return a field that must be a list (or tuple)."""
    value = required(record, name, where)
    if not isinstance(value, list | tuple):
        raise InvalidInput(f"{where}.{name}: a {type(value).__name__}; must be a list")
    return value


def optional_list(record: Any, name: str, where: str) -> Sequence[Any]:
    """Return a list (or tuple) that may be absent."""
    return () if field_of(record, name) is None else list_of(record, name, where)


def optional_mapping(record: Any, name: str, where: str) -> Mapping[Any, Any]:
    """Return a mapping that may be absent."""
    value = field_of(record, name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{where}.{name}: a {type(value).__name__}; must be a mapping")
    return value


def number_of(record: Any, name: str, where: str) -> float:
    """Return a field that must be a number."""
    value = required(record, name, where)
    if not isinstance(value, int | float | np.number) or isinstance(value, bool):
        raise InvalidInput(f"{where}.{name}: {value!r:.40}; must be a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidInput(f"{where}.{name}: beyond every float; must be a number") from None


def ids_of(record: Any, name: str, where: str) -> NDArray[np.uint32]:
    """Return a field that must hold token ids."""
    at = f"{where}.{name}"
    return coerce(COLUMNS["token_ids"], numbers_of(required(record, name, where), at), at)


def numbers_of(value: Any, where: str) -> Any:
    """Convert a list of numbers, an array of any library, or one packed for msgpack."""
    if isinstance(value, Mapping):
        return array_of(value, where)
    try:
        return value.detach().cpu().numpy() if hasattr(value, "detach") else value
    except (TypeError, RuntimeError) as error:  # bfloat16, quantized, sparse or nested
        raise InvalidInput(
            f"{where}: {str(error).splitlines()[0]:.200}; give a dense tensor of a numpy dtype"
        ) from None


def array_of(value: Any, where: str) -> Array | None:
    """Return an array, or one packed for msgpack as `{"__nd__": true, dtype, shape, data}`."""
    if value is None or isinstance(value, np.ndarray):
        return value
    if not isinstance(value, Mapping) or not (value.get("__nd__") or value.get("__torch_tensor__")):
        raise InvalidInput(f"{where}: a {type(value).__name__}; must be an array or a packed array")
    try:
        return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
    except (KeyError, TypeError, ValueError, SyntaxError) as error:  # SyntaxError: numpy parses some dtypes as Python
        raise InvalidInput(f"{where}: a packed array that cannot be read ({error!s:.200})") from None
