"""The training loop, its optimizer, resume states, and the trial of a new base model."""
