"""Replies of vLLM's offline engine, in a process of its own, that count once its first tokens were probed."""
