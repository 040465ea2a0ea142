"""Measurements of the service and of the selection; each module is a command of its own."""
