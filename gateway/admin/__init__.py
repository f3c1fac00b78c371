"""The control plane: what operators see and change, over HTTP."""
