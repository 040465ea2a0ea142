"""Uploads of large files in parts."""
