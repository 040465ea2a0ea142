"""The `spard` commands of customers and providers: most call the service over HTTP, some start or maintain it."""
