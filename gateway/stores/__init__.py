"""What replicas must agree on: the ports over Redis (`redis_*`, `lua/*.lua`) and over dicts (`memory*`).

`control/` is what the control plane keeps and reads; `flushing` writes what workers count.
"""
