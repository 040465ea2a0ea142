"""Quotas of projects and their usage."""
