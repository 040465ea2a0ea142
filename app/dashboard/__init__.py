"""The web dashboard: HTML pages on top of the same services as the API."""
