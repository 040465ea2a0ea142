"""The lab: a tiny aligned model and its data, made from a seed, on which the science is tested."""
