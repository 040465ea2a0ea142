"""Audits of models: suites, judges, scorers, rates, and the gate that decides on release."""
