"""API keys: who calls, what they may do, and how a provider hands keys out and takes them back."""
