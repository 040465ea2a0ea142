"""Who did what to what: a table that only grows, each row chained to the one before by its hash."""
