"""Pure: callers moved from one place to another, and what takes them back."""
