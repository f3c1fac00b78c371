"""Load, sweep, simulate, plan, advise: their options here, their work in `gateway.tuning`."""
