"""Losses, their gradients, and arithmetic on parameter vectors."""
