"""Pure: two answers held against each other, and what came of many such."""
