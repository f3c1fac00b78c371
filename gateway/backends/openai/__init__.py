"""OpenAI-compatible endpoints, over an HTTP/1.1 client of our own (docs/decisions/0005)."""
