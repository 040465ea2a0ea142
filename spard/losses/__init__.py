"""Losses, their gradients and the vectors that hold them."""
