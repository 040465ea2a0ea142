"""What a project may take up, and what it has."""
