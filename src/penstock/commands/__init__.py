"""The commands of the `penstock` command line, one per module."""
