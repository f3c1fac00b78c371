"""Offering load: who is asked (targets), when (the runner), and how much can be borne (finding)."""
