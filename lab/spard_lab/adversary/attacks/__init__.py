"""The shipped attacks, grouped by what they hide; the registry finds every `Attack` defined in a module here."""
