"""Reports of a job for people."""
