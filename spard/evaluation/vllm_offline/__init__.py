"""Audit replies by vLLM's offline engine in a process of its own; they count only if its first tokens pass a probe."""
