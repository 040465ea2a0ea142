"""Launchers start a process for each queued job; which process works on a job, its row's lease and token decide."""
