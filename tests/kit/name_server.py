"""A name server of a test's own, as an engine has one for its containers: names to addresses, changed while it runs."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Mapping, Sequence

TYPE_A, CLASS_IN, NO_SUCH_NAME, ANSWER = 1, 1, 3, 0x8180
HEADER = struct.Struct("!6H")
TTL_S = 1


class NameServer(asyncio.DatagramProtocol):
    """Answers questions for IPv4 addresses out of `names`; every other name does not exist."""

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self._names = names
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._transport.sendto(answer(data, self._names), addr)


def answer(question: bytes, names: Mapping[str, Sequence[str]]) -> bytes:
    """The answer to one question (RFC 1035, 4.1)."""
    number = HEADER.unpack_from(question)[0]
    labels, at = [], HEADER.size
    while length := question[at]:
        labels.append(question[at + 1 : at + 1 + length].decode())
        at += 1 + length
    asked = question[HEADER.size : at + 5]
    addresses = names.get(".".join(labels), ()) if asked[-4:] == struct.pack("!2H", TYPE_A, CLASS_IN) else ()
    code = 0 if ".".join(labels) in names else NO_SUCH_NAME
    records = b"".join(
        struct.pack("!3HIH4B", 0xC000 | HEADER.size, TYPE_A, CLASS_IN, TTL_S, 4, *map(int, address.split(".")))
        for address in addresses
    )
    return HEADER.pack(number, ANSWER | code, 1, len(addresses), 0, 0) + asked + records


@contextlib.asynccontextmanager
async def name_server(address: str, port: int, names: Mapping[str, Sequence[str]]) -> AsyncIterator[None]:
    """Answer at `address` and `port` while the block runs."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: NameServer(names), local_addr=(address, port))
    try:
        yield
    finally:
        transport.close()
