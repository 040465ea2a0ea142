"""Variants of SPAG: a module of the variant's name whose `correction()` makes what corrects theta in one run."""
