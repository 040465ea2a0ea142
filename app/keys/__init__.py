"""API keys: authentication, scopes, and how a provider creates and revokes keys."""
