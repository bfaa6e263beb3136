"""What a program uses: `open` and `connect`, a `Plane` for producers and a `Source` for each rank."""

from penstock.client.api import connect, open, open_settings  # noqa: A004
from penstock.client.plane import Plane
from penstock.client.source import Source, SourceStep

__all__ = ["Plane", "Source", "SourceStep", "connect", "open", "open_settings"]
