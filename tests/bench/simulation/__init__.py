"""Whether simulations come true on this machine."""
