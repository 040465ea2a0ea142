"""Dry runs of a policy: what it changes for past jobs, computed from their stored records."""
