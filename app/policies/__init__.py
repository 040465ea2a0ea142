"""Policies: what customers may request and what the gate demands, as immutable versions."""
