"""Checks of a base model's folder by its files alone: no torch, no transformers, nothing is loaded."""
