"""Commands that speak to a service over HTTP, as a customer or a provider does."""
