"""The labs: small aligned models with their data, made from a seed, on which the science is tested."""
