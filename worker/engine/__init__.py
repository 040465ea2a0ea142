"""The embedded engine: the process behind the API that holds one base model with its adapters and writes replies."""
