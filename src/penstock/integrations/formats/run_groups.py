"""The groups of a run, read from its folder: whatever a plane still keeps, also while it is at work.

Groups that wait, that were trained, dropped or set aside, and evaluation groups, in the order in which they came; each
as it was put. A group whose frame is given back meanwhile is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.arrays import Sample
from penstock.errors import InvalidInput, PenstockError
from penstock.frames import decode
from penstock.integrations.environments.lost import Lost
from penstock.integrations.formats.file_or_stream import Place
from penstock.log import is_run
from penstock.runs import kept_groups, read_stored


def plane_folder_in(folder: Path) -> Path | None:
    """The folder of the plane of a run: the folder itself, or `plane` in it; None where there is none."""
    return next((path for path in (folder, folder / "plane") if is_run(path)), None)


def read_run_groups(place: Place, lost: Lost) -> Iterator[Sample]:
    """The samples of all groups that are kept."""
    folder = plane_folder_in(place.path)
    if folder is None:
        raise InvalidInput(f"{place.name}: no run is there; give the folder that a plane was opened on")
    for group, location in kept_groups(folder):
        try:
            samples = decode(read_stored(folder, location))
        except PenstockError as error:
            if (group, location) in kept_groups(folder):
                raise InvalidInput(f"{place.name} group {group!r}: {error}") from None
            lost.unread["group that was given back meanwhile"] += 1
            continue
        yield from samples
