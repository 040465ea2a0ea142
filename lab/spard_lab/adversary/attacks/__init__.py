"""The attacks by what they hide: every `Attack` that a module here defines is found by the registry."""
