"""`penstock serve`: the process around a plane, with its watchdog, HTTP API and metrics page."""

from penstock.server.plane_process import PlaneProcess

__all__ = ["PlaneProcess"]
