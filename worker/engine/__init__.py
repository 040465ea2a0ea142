"""An engine: the process that holds one base model with its adapters, and writes replies behind the API."""
