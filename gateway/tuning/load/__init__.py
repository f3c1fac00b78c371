"""Traffic from one process, measured: `gateway load`."""
