"""Launchers: what starts a process for each queued job. The job's row with lease and token stays what decides."""
