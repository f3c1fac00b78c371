"""LLM endpoints, over an HTTP/1.1 client of our own (docs/decisions/0005): a codec for each protocol."""
