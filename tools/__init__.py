"""Programs for those who work on the code; nothing here is installed."""
