"""Shared parts of all routes: schemas, pagination, limits, errors and streaming bodies."""
