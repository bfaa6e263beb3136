"""Doors to what people already run: trainers, environments and servers of others.

A door imports its package only when it is used, so nothing here costs anybody who does not use it. docs/integrations
has a page for each, with the version it is tested with and what it does not carry.
"""
