"""Files that customers upload and that jobs produce."""
