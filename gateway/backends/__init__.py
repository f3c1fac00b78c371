"""Places that can answer. Each adapter translates its library's errors into `BackendError` once, here."""
