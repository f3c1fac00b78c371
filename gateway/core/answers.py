"""Answers that are kept: whose they are, who is at work on one, and what is found."""

from dataclasses import dataclass
from typing import Final, Literal

from gateway.core.types import InferenceRequest

MAX_ANSWER_BYTES: Final = 2**20
AROUND_BYTES: Final = 900  # that a kept answer takes in Redis besides itself: names, index, times (measured)
LEASE_US: Final = 10_000_000
RENEW_US: Final = 3_000_000
State = Literal["fresh", "kept", "busy", "other"]


def room_of(answer: bytes) -> int:
    """How many bytes of its owner's bound `answer` takes."""
    return len(answer) + AROUND_BYTES


EVERYBODY: Final = "*"
"""The owner of what all tenants share; no tenant may have this name (`core.keys.TENANT`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one kept answer.

    Attributes:
        kind: `once`: of a request with an idempotency key. `cache`: of requests that are the same.
        owner: whose it is: a tenant, or `EVERYBODY`.
        name: hexadecimal.
    """

    kind: Literal["once", "cache"]
    owner: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right of one request to fill a slot, as long as its lease lasts.

    Attributes:
        by: this claim's own name among all claims, without blanks.
        fingerprint: of the request, as far as the slot's name does not say it.
    """

    slot: Slot
    by: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a claim came upon.

    Attributes:
        state: `fresh`: nothing, and the claim holds. `kept`: an answer. `busy`: another claim. `other`: an answer
            to, or the claim of, a request with another fingerprint.
        answer: the bytes that were kept; those and their times only where `kept`.
        age_us / left_us: since it was kept, and until it is forgotten.
    """

    state: State
    answer: bytes = b""
    age_us: int = 0
    left_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheControl:
    """What a caller's `Cache-Control` asks for.

    Attributes:
        use: false (`no-store`): no kept answer is given, and none is kept.
        max_age_us: an older one is not given; -1 (`no-cache`): none is.
    """

    use: bool = True
    max_age_us: int | None = None

    @property
    def accepts_all(self) -> bool:
        """Whether any kept answer will do."""
        return self.max_age_us is None


def cache_control(header: str) -> CacheControl:
    """Read `header` (RFC 9111, 5.2.1); words that are unknown or malformed are passed over."""
    words = {}
    for word in header.lower().split(","):
        name, _, value = word.strip().partition("=")
        words[name.strip()] = value.strip().strip('"')
    if "no-store" in words:
        return CacheControl(use=False)
    if "no-cache" in words:
        return CacheControl(max_age_us=-1)
    seconds = words.get("max-age", "")
    if seconds.isascii() and seconds.isdecimal():
        return CacheControl(max_age_us=int(seconds[:10]) * 1_000_000)
    return CacheControl()


def is_cacheable(request: InferenceRequest) -> bool:
    """Whether its answer depends on nothing but itself: it is part of no sequence, and of no order."""
    return request.sequence is None and not request.ordering_key
