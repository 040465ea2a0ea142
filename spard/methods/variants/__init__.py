"""Variants of SPAG, one module each; its function `correction()` returns the correction of theta for one run."""
