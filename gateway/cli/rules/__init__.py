"""`gateway rules`: the rules of the control plane, and those in files."""
