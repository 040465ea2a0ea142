"""Programs for maintainers of the code; none of them is installed."""
