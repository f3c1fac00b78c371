"""What replicas must agree on: the ports over Redis (`redis_*`, `lua/*.lua`) and over dicts (`memory*`).

`control/` is what the control plane keeps and reads; `flushing` writes what workers count.
"""

import sys

_UNUSED = "opentelemetry.sdk.metrics"
if _UNUSED not in sys.modules:
    # redis-py looks for it, for metrics of its own that nobody turns on here: a twentieth of a worker's start.
    sys.modules[_UNUSED] = None  # type: ignore[assignment]  # which Python reads as "is not there"
    import redis  # noqa: F401 - for the others to find

    del sys.modules[_UNUSED]
