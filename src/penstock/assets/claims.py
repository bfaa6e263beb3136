"""Which run may see which image: one empty marker blob per run and image.

A writer creates the marker under `pending/` before it stores the image, and moves it to `claims/` afterwards. A writer
that is killed in between leaves a pending marker without an image; no reference to that image was returned. A marker
under `claims/` without an image means that data was lost.

Several runs can share one store, where an image that both saw is stored once. A run reads only what it has claimed, so
a reference from another run resolves to nothing, with the same error as an id that never existed. Claims are also the
reference counts: when a run is deleted on request, its claims go, and then the images without any claim. Nothing else
ever removes a source image, because it cannot be recomputed.

Deleting may race with another run that puts the same image at that moment:

    writer    1 claim the image          2 look for the image; write it if it is gone
    remover   1 move the image aside     2 look for claims; move it back if there is one

In every interleaving either the writer finds the image gone and writes it, or the remover finds the claim and moves the
image back.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.assets.blobs import Blobs

_CLAIMS = "claims"
_PENDING = "pending"
_TRASH = "trash"


def claim_name(run: str, image: str) -> str:
    return f"{_CLAIMS}/{run}/{image[:2]}/{image}"


def pending_name(run: str, image: str) -> str:
    return f"{_PENDING}/{run}/{image[:2]}/{image}"


def claims(blobs: Blobs) -> dict[str, set[str]]:
    """Return the runs that claim each image, by hash, including those whose writer has not finished."""
    runs: dict[str, set[str]] = {}
    for folder in (_PENDING, _CLAIMS):  # in the order in which a marker moves, so that a moving one is not missed
        for run, image in _markers(blobs, folder):
            runs.setdefault(image, set()).add(run)
    return runs


def stored(blobs: Blobs) -> set[str]:
    """Return the hashes of the images that some writer finished storing."""
    return {image for _, image in _markers(blobs, _CLAIMS)}


def _markers(blobs: Blobs, folder: str) -> Iterator[tuple[str, str]]:
    for info in blobs.list(folder):
        _, run, _, image = info.name.split("/")
        yield run, image


def remove_run(blobs: Blobs, run: str) -> list[str]:
    """Remove a run's claims and every image without a claim. Returns the hashes of those images."""
    held = claims(blobs)
    mine = {image for image, runs in held.items() if run in runs}
    for image in sorted(mine):
        blobs.delete(pending_name(run, image))
        blobs.delete(claim_name(run, image))
    alone = {image for image in mine if held[image] == {run}}
    for info in list(blobs.list("images")):
        if hash_of(info.name) in alone:
            blobs.move(info.name, f"{_TRASH}/{info.name.rsplit('/', 1)[1]}")
    return empty_trash(blobs)


def empty_trash(blobs: Blobs) -> list[str]:
    """Move back what is claimed and delete the rest. Completes what a killed remover began. Returns deleted hashes."""
    aside = [info.name for info in blobs.list(_TRASH)]
    still = claims(blobs) if aside else {}  # must be read after the trash: step 2 of the remover above
    removed = []
    for name in aside:
        image = hash_of(name)
        if image in still:
            blobs.move(name, f"images/{image[:2]}/{name.rsplit('/', 1)[1]}")
        elif blobs.delete(name):
            removed.append(image)
    return sorted(removed)


def hash_of(name: str) -> str:
    """Return the hash in an image blob's name."""
    return name.rsplit("/", 1)[-1].split(".", 1)[0]
