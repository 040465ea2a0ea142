"""Waivers: two people of the provider release an adapter that the gate held back, for a time."""
