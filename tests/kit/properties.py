"""Properties are judged by what comes of them, never by how long it took on a busy machine."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
