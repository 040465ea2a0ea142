"""The pages that a browser shows: thin, over the same services as the API."""
