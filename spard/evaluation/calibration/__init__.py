"""Labeled replies, and the error rates of judges on them."""
