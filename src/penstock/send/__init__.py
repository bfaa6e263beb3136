"""The delivery protocol, without I/O, and the carriers that move its messages."""
