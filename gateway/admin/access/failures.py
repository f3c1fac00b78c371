"""What one address has done wrong within a minute: so that nobody tries keys, and no flood fills the audit log."""

import ipaddress
from collections import OrderedDict
from typing import Final

WINDOW_S: Final = 60.0
MAX_FAILURES: Final = 10
MAX_ADDRESSES: Final = 10_000  # remembered at once; of more the ones that were seen the longest ago are forgotten
MAX_LOG_INS: Final = 60  # of one actor: Redis keeps each until it ends, and the audit log for good
MAX_AUDITED: Final = 200  # refusals a minute that are written down, of all addresses together
LONG_TOKEN: Final = 32
"""Bytes of a token that nobody finds by trying: one of so many is looked at, whoever else fails from its address."""


class Counts:
    """Counts by name, each for a minute from its first. `now_s` is of any clock that never goes back."""

    def __init__(self) -> None:
        self._began: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def add(self, name: str, now_s: float) -> int:
        """Count one more; how many there are now."""
        began_s, count = self._at(name, now_s)
        self._began[name] = (began_s, count + 1)
        self._began.move_to_end(name)
        if len(self._began) > MAX_ADDRESSES:
            self._began.popitem(last=False)
        return count + 1

    def left_s(self, name: str, now_s: float, *, most: int) -> float:
        """How long the name has to wait as it has `most` or more; 0 where it has fewer."""
        began_s, count = self._at(name, now_s)
        return began_s + WINDOW_S - now_s if count >= most else 0.0

    def _at(self, name: str, now_s: float) -> tuple[float, int]:
        began_s, count = self._began.get(name, (now_s, 0))
        return (began_s, count) if now_s - began_s < WINDOW_S else (now_s, 0)


def network(address: str) -> str:
    """What one caller may have all of: an IPv4 address, the /64 network of an IPv6 one (RFC 4291, 2.5.4)."""
    try:
        of = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(of, ipaddress.IPv4Address):
        return str(of)
    if of.ipv4_mapped is not None:
        return str(of.ipv4_mapped)
    return str(ipaddress.ip_network((of, 64), strict=False))
