"""The rules and switches of the control plane: read, changed, seen through."""
