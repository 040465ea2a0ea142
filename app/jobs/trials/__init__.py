"""What a policy would have changed for jobs of the past: told from what is stored of them."""
