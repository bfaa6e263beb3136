"""File formats of other trainers, for `penstock convert`."""
