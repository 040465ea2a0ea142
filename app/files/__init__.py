"""What customers upload and what jobs produce."""
