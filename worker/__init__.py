"""The worker: claims jobs by lease, runs each in a child process, and publishes the results."""
