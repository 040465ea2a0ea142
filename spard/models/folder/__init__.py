"""What is wrong with a base model's folder, told by its files alone: no torch, no transformers, nothing loaded."""
