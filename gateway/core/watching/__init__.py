"""Pure: what became of requests, added up, written down, and explained."""
