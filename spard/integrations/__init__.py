"""The defense inside other people's training loops."""
