"""Moves messages between a plane and its clients: within a process, through files, over sockets; and the keys."""
