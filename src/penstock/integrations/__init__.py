"""Integrations with other software: trainers, environments, file formats and TransferQueue.

An integration imports its package when it is first used, so it costs nothing until then. docs/integrations has a page
for each, with the version it is tested with and what it does not support.
"""
