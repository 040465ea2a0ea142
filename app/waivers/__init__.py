"""How two people of the provider release, for a time, an adapter that the gate held back."""
