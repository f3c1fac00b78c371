"""How a Triton server is connected to: by our own client or, for messages that are compressed, by gRPC's; with TLS."""

from collections.abc import Callable
from typing import Final, Literal

import grpc

from gateway.backends.grpc.aio import AioChannel
from gateway.backends.grpc.channel import ALPN, GrpcChannel
from gateway.backends.triton.replica import Channel
from gateway.settings import TlsSettings

Compression = Literal["none", "gzip"]
COMPRESSIONS: Final[tuple[Compression, ...]] = ("none", "gzip")
OpenChannel = Callable[[str, str], Channel]
"""A channel to an address, and the host's name in the url that stands for it: a certificate is of the name."""


def plain(target: str, _: str) -> Channel:
    """Our own client, in the clear."""
    return GrpcChannel(target)


def opener(compression: Compression = "none", tls: TlsSettings | None = None) -> OpenChannel:
    """How the settings want it. Raises `ValueError` for certificates that cannot be used."""
    if tls is None:
        return plain if compression == "none" else lambda target, _: AioChannel(target)
    # Made for gzip too: gRPC's library would tell of a file that is none at the first call, and poorly.
    context = tls.context()
    name = tls.server_name
    if compression == "none":
        context.set_alpn_protocols([ALPN])
        return lambda target, host: GrpcChannel(target, tls=context, server_name=name or host)
    credentials = _credentials(tls)
    return lambda target, host: AioChannel(target, credentials=credentials, server_name=name or host)


def _credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    if tls.ca_file is None:  # the settings see to it; without one the library would trust a list of its own
        raise ValueError("tls.ca_file: is needed where messages are compressed")
    own = (tls.key_file, tls.cert_file)
    key, chain = (None if path is None else path.read_bytes() for path in own)
    return grpc.ssl_channel_credentials(tls.ca_file.read_bytes(), key, chain)
