"""Labeled replies, and the errors of judges on them."""
