"""Webhooks that report the end of jobs to customers."""
