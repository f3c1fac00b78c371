"""Which requests run together and when: pure decisions, and the thin acting side that obeys them."""
