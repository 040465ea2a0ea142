"""The audit log: an append-only table in which each row is chained to the previous one by its hash."""
