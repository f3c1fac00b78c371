"""HTTP/1.1 to whoever calls us: every process's server."""
