"""gRPC over HTTP/2, as much of it as Triton needs (docs/decisions/0012)."""
