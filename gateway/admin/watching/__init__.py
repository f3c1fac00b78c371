"""What happens and has happened: figures, requests and their reasons, shadows, workers, usage, the audit log."""
