"""Customers are told when a job has ended."""
