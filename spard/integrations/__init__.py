"""The defence inside other people's training loops."""
