"""Pure decisions: no clock, no I/O, no client library. Everything here is given `now_us`, health and chance."""
