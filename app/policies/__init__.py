"""What customers may ask for and what releases an adapter, as versions that are never changed."""
