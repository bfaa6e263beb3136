"""Where frames live: engines that hold bytes at locations, and the marker that names the run they belong to.

    write     a `Writer` appends frames to segments of its own; durable when it returns
    read      byte ranges of a frame; `Gone` and `Away` are different errors
    delete    frames and segments by name, through `Custody`, which moves the marker first

Engines know nothing of groups, tables or steps. Read `in_memory.py` first: it is the specification.
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
