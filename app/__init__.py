"""The service: OpenAI's fine-tuning API, its database and storage, and the provider's tools."""
