"""What is asked of admissions where their cost is measured: limits that nobody reaches, of all kinds."""

from typing import Final

from gateway.core import rate_limit
from gateway.core.admissions import Wanted
from gateway.core.types import Caller, Limit

MANY: Final = 10**9
ONE: Final = (Limit(kind="requests", amount=MANY, per="minute", burst=MANY),)
FOUR: Final = (
    *ONE,
    Limit(kind="tokens", amount=MANY, per="minute", burst=MANY),
    Limit(kind="usd", amount=MANY * 1000, per="month", burst=0),
    Limit(kind="concurrent", amount=MANY, per="", burst=0),
)


def wanted(limits: tuple[Limit, ...], ordering_key: str) -> Wanted:
    """What the walk asks for a request of a caller with these limits."""
    counted = rate_limit.counters(Caller(key_id="k", tenant="t", limits=limits), "task", "model", "interactive")
    takes = rate_limit.takes(counted, tokens=500, nano_usd=1000)
    return Wanted(tenant="t", takes=takes, ordering_key=ordering_key, queue_bound=1000)
