"""Where frames live: engines that hold bytes under locations, and the marker that says whose they are.

    write     a `Writer` appends frames to segments of its own; durable when it returns
    read      byte ranges of a frame; `Gone` and `Away` are different errors
    delete    frames and segments by name, through `Custody`, which moves the marker first

Engines know nothing of groups, tables or steps. `in_memory.py` is the one to read first.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
