"""What replicas must agree on: the ports over Redis (`redis_*`, `lua/*.lua`) and over dicts (`memory`)."""
