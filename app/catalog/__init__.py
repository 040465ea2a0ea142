"""What the provider offers: base models, safety pools, audit suites."""
