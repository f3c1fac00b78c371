"""The gateway's own code and the runtime's own schedulers, under a simulated clock."""
