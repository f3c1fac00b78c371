"""What the control plane keeps in Redis, and what workers write for it to read."""
