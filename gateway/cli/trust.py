"""Whom commands trust over https: the system's authorities, or those of SSL_CERT_FILE, as the processes do."""

import ssl


def system_trust() -> ssl.SSLContext:
    """For `verify=` of httpx, which by itself would ask a list of its own that knows no private authority."""
    return ssl.create_default_context()
