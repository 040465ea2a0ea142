"""Give hints for URLs that are not served: clients of OpenAI's API request more than fine-tuning."""

from __future__ import annotations

_ANSWERING = ("chat/completions", "completions", "responses", "moderations")
_ELSEWHERE = ("embeddings", "batches", "evals", "images", "audio", "assistants", "threads")
_AZURE = ("/openai/", "/deployments/", "/v1/deployments/")  # the last two with a base_url
_DOMAINS = ("files", "uploads", "fine_tuning", "models", "admin", "webhook_endpoints", *_ANSWERING, *_ELSEWHERE)


def hint(path: str) -> str:
    """Return a hint as a sentence with a leading space, or an empty text."""
    if path.startswith(_AZURE):
        return " Azure's paths are not served; take OpenAI(base_url=...) that ends with /v1 in place of AzureOpenAI."
    under = path.removeprefix("/v1/")
    if under == path:
        is_known = path.lstrip("/").startswith(_DOMAINS)
        return " Paths begin with /v1: let the client's base_url end with it." if is_known else ""
    if under.startswith(_ELSEWHERE):
        return f" Not served here; models answer at {', '.join(_ANSWERING[:3])}."
    return ""
