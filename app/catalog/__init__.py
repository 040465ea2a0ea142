"""The provider's catalog: base models, safety pools and suites."""
