"""Benchmarks of the service, the training loop and the selection; most modules are commands."""
