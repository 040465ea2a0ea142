"""Outputs of a run: reports, manifests, archives and the proof of an adapter."""
