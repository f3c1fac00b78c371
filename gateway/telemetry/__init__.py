"""What is told of requests: metrics and logs. Each is an observer; the walk knows none of them by name."""
