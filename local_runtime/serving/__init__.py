"""From a repository on disk to versions that can be asked: loaded, changed without losing a request, unloaded."""
