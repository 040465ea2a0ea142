"""Large files sent in parts that become one file."""
