"""Start a keeper as a process of its own from a program, and have it end with the program."""

from __future__ import annotations

from penstock.serve.process.plane_process import PlaneProcess


class KeeperProcess(PlaneProcess):
    """A running `penstock keep`, started with the words that follow it on the command line."""

    command = "keep"

    @property
    def urls(self) -> list[str]:
        return [str(self.ready["url"])]

    @property
    def name(self) -> str:
        return str(self.ready["name"])
