"""`python -m local_runtime bench`: naive against batched, measured on the models of a repository."""
