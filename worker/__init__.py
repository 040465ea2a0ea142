"""The worker: holds leases of jobs, runs each in a child process, and publishes what it made."""
