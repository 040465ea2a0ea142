"""Judges by name."""
