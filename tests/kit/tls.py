"""A plugin: the clients of a process share TLS contexts, each of which takes some 15 ms to load its certificates."""

import functools

from httpx._transports import default

default.create_ssl_context = functools.cache(default.create_ssl_context)
