"""Checkpoints of epochs: list, download, delete, and permissions to see them."""
