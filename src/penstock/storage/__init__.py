"""Where frames live: engines that hold bytes under locations, and the marker that says whose they are.

    write     a `Writer` appends frames to segments of its own; durable when it returns
    read      byte ranges of a frame; `Gone` and `Away` are different errors
    delete    frames and segments by name, through `Custody`, which moves the marker first

Engines know nothing of groups, tables or steps. `in_memory.py` is the one to read first.
"""

from penstock.storage.custody import Custody, Marker, check_log, read_marker
from penstock.storage.filesystem import is_shared
from penstock.storage.folder import FolderStorage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.interface import (
    Away,
    Gone,
    Location,
    SegmentFile,
    SegmentSealed,
    Storage,
    Writable,
    parse_location,
)
from penstock.storage.object_requests import is_object_url
from penstock.storage.objects import ObjectStorage
from penstock.storage.picking import DamagedFrame, Pick, gather_picks, read_each
from penstock.storage.places import KeptStorage, StorageRun, address_of, erase, open_storage, runs_below
from penstock.storage.signed import SIGNED_SCHEMES, Sign, SignedStorage, prove_signing
from penstock.storage.writer import Writer

__all__ = [
    "SIGNED_SCHEMES",
    "Away",
    "Custody",
    "DamagedFrame",
    "FolderStorage",
    "Gone",
    "KeptStorage",
    "Location",
    "Marker",
    "MemoryStorage",
    "ObjectStorage",
    "Pick",
    "SegmentFile",
    "SegmentSealed",
    "Sign",
    "SignedStorage",
    "Storage",
    "StorageRun",
    "Writable",
    "Writer",
    "address_of",
    "check_log",
    "erase",
    "gather_picks",
    "is_object_url",
    "is_shared",
    "open_storage",
    "parse_location",
    "prove_signing",
    "read_each",
    "read_marker",
    "runs_below",
]
