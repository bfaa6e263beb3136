"""A storage backend for TransferQueue."""
