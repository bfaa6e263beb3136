"""Read images as environments describe them beside a prompt: hashes, placeholders and grids, without pixels.

    {"mm_hashes": {"image": [HASH, ...]}, "mm_placeholders": {"image": [{"offset": 4, "length": 66}, ...]},
     "mm_items": {"image": [{"image_grid_thw": [[1, 12, 22]]}, ...]}}

The lists are aligned. Missing placeholders are inferred from the runs of image tokens in `mm_token_type_ids`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ImageSpan
from penstock.capture.records import field_of, list_of, optional_mapping
from penstock.errors import InvalidInput

HashLookup = Callable[[str], str]
"""An environment's hash of an image -> sha256 of the image's bytes, as 64 hex digits."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("mm_hashes", "mm_placeholders", "mm_items")
_MOST_NUMBERS = 16
"""A descriptor has a grid and sizes. A field with more numbers than this holds pixels or features."""


def read_descriptors(
    data: Any, types: NDArray[np.uint8] | None, lookup: HashLookup | None, where: str
) -> tuple[ImageSpan, ...]:
    """Return the described images. Raises InvalidInput for pixels, other modalities, and inconsistent counts."""
    parts = {name: optional_mapping(data, name, where) for name in _FIELDS}
    unknown = [str(name) for name in data if name not in _FIELDS] if isinstance(data, Mapping) else []
    if unknown:
        raise InvalidInput(f"{where}.{unknown[0]:.40}: not a field of a descriptor; they are {', '.join(_FIELDS)}")
    for name, part in parts.items():
        other = next((str(kind) for kind, found in part.items() if kind != "image" and not _is_empty(found)), None)
        if other is not None:
            raise InvalidInput(f"{where}.{name}: {other:.40}; only images are supported, leave the rollout out")
    if not any("image" in part for part in parts.values()):
        return ()
    items = list_of(parts["mm_items"], "image", f"{where}.mm_items")
    hashes = list_of(parts["mm_hashes"], "image", f"{where}.mm_hashes")
    places = _places(parts["mm_placeholders"], types, where)
    if not len(items) == len(hashes) == len(places):
        raise InvalidInput(
            f"{where}: {len(items)} items, {len(hashes)} hashes and {len(places)} placeholders of images; give one of "
            "each per image"
        )
    return tuple(
        _span(item, name, place, lookup, f"{where}.mm_items['image'][{i}]")
        for i, (item, name, place) in enumerate(zip(items, hashes, places, strict=True))
    )


def _places(given: Mapping[Any, Any], types: NDArray[np.uint8] | None, where: str) -> list[tuple[int, int]]:
    """Return (offset, length) of each image's placeholder tokens."""
    if "image" not in given:
        if types is None:
            raise InvalidInput(f"{where}.mm_placeholders: missing, and so are mm_token_type_ids; give one of the two")
        # Types 0 1 1 0 1 have edges 1 3 4 5: images at (1, 2) and (4, 1).
        edges = np.flatnonzero(np.diff(np.concatenate([[0], types == 1, [0]]).astype(np.int8))).tolist()
        return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    found = []
    for i, one in enumerate(list_of(given, "image", f"{where}.mm_placeholders")):
        pair = one if isinstance(one, list | tuple) else (field_of(one, "offset"), field_of(one, "length"))
        if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in pair):
            raise InvalidInput(f"{where}.mm_placeholders['image'][{i}]: {one!r:.60}; must be an offset and a length")
        found.append((pair[0], pair[1]))
    return found


def _span(item: Any, name: Any, place: tuple[int, int], lookup: HashLookup | None, where: str) -> ImageSpan:
    fields = item if isinstance(item, Mapping) else {"image_grid_thw": field_of(item, "image_grid_thw")}
    for field, value in fields.items():
        if isinstance(value, bytes | bytearray | memoryview) or _count(_plain(value)) > _MOST_NUMBERS:
            raise InvalidInput(
                f"{where}[{str(field)!r:.40}]: pixels or features, which do not travel; keep the image in an asset "
                "store and its descriptor here"
            )
    grid = _grid(fields.get("image_grid_thw"), where)
    offset, length = place
    merge = math.isqrt(math.prod(grid) // length) if length else 0
    digest = _digest(name, lookup, where)
    return read_span({"hash": digest, "grid": grid, "offset": offset, "length": length, "merge": merge}, where)


def read_span(given: Any, where: str) -> ImageSpan:
    """Read an image of a sample: an `ImageSpan`, or its fields by name."""
    try:
        span = ImageSpan(**given) if isinstance(given, Mapping) else given
        # Convert to plain values and back, because msgspec checks the types of fields only when it converts.
        return msgspec.convert(msgspec.to_builtins(span), ImageSpan)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{where}: {error}; give an ImageSpan or its fields") from None


def _is_empty(found: Any) -> bool:
    return hasattr(found, "__len__") and len(found) == 0


def _count(value: Any) -> int:
    """Return how many numbers a field holds. Uneven lists, which make no array, count as too many."""
    try:
        return int(np.size(value))
    except ValueError:
        return _MOST_NUMBERS + 1


def _plain(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _grid(given: Any, where: str) -> tuple[int, int, int]:
    """[t, h, w] or [[t, h, w]]."""
    try:
        flat = np.asarray(_plain(given)).reshape(-1)
        if flat.dtype.kind in "iu" and len(flat) == 3 and 1 <= int(flat.min()) <= int(flat.max()) < 1 << 20:
            return int(flat[0]), int(flat[1]), int(flat[2])
    except (TypeError, ValueError):
        pass
    raise InvalidInput(f"{where}.image_grid_thw: {given!r:.60}; must be time, height and width in patches")


def _digest(name: Any, lookup: HashLookup | None, where: str) -> str:
    if lookup is not None:
        name = lookup(str(name))
    if not isinstance(name, str) or not _SHA256.fullmatch(name):
        raise InvalidInput(
            f"{where}: hash {name!r:.80} is not the sha256 of the image's bytes in 64 hex digits; pass image_hashes=, "
            "which gives it for the environment's own hash"
        )
    return name
