"""Base models, LoRA adapters and generation."""
