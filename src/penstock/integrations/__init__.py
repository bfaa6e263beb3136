"""Connections to what people already run: trainers, environments, file formats and TransferQueue.

An integration imports its package only when it is used, so it costs nothing until then. docs/integrations has a page
for each, with the version it is tested with and what it does not carry.
"""
