"""Audit of a model: suites, judges, scorers, rates and the gate."""
