"""What a rule says of requests beside where they go: their order, the shared store's loss, answers that are kept."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from gateway.core.rules.fields import choice_at, count_at, flag_at, mapping_at, only_known

OnStoreDown = Literal["local", "open", "closed"]
Idempotency = Literal["refuse", "wait"]
MAX_QUEUE_SIZE: Final = 100_000
MAX_WAIT_MS: Final = 3_600_000
MAX_TTL_S: Final = 30 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """How requests with one ordering key go.

    Attributes:
        mode: `serial`: the next is sent when the one before has ended. `release`: all are sent at once, and answered in
            their order.
        max_queue_size: how many may be under way and wait under one key.
        max_wait_ms: for the turn; 0 = as long as the request has time.
        on_store_down: `refuse`, or `local`: each worker keeps the order of its own requests.
    """

    mode: Literal["serial", "release"] = "serial"
    max_queue_size: int = 1000
    max_wait_ms: int = 0
    on_store_down: Literal["refuse", "local"] = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Answers are kept, and given to the same request again.

    Attributes:
        ttl_s: for how long.
        shared_by: whether tenants see each other's.
        single_flight: the same requests at the same time wait for one of them.
    """

    ttl_s: int
    shared_by: Literal["tenant", "all"] = "tenant"
    single_flight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """All of a rule's.

    Attributes:
        on_store_down: see `core.admissions.Wanted`.
        idempotency: a second request with the key of one that is under way is refused (409), or waits for its answer.
    """

    ordering: Ordering = Ordering()
    cache: Cache | None = None
    on_store_down: OnStoreDown = "local"
    idempotency: Idempotency = "refuse"


DEFAULT: Final = Policies()
FIELDS: Final = ("ordering", "cache", "on_store_down", "idempotency")


def policies(fields: Mapping[str, Any], at: str) -> Policies:
    """Those of a rule's document. Raises `RuleError`."""
    cache = fields.get("cache")
    return Policies(
        ordering=_ordering(fields.get("ordering", {}), f"{at}: ordering"),
        cache=None if cache is None else _cache(cache, f"{at}: cache"),
        on_store_down=choice_at(
            fields.get("on_store_down", "local"), ("local", "open", "closed"), f"{at}: on_store_down"
        ),
        idempotency=choice_at(fields.get("idempotency", "refuse"), ("refuse", "wait"), f"{at}: idempotency"),
    )


def policies_document(told: Policies) -> dict[str, Any]:
    """The inverse of `policies`; what is as usual is left out."""
    return {name: value for name, value in asdict(told).items() if value != asdict(DEFAULT)[name]}


def _ordering(entry: object, at: str) -> Ordering:
    fields = mapping_at(entry, at)
    only_known(fields, ("mode", "max_queue_size", "max_wait_ms", "on_store_down"), at)
    size = count_at(fields.get("max_queue_size", 1000), MAX_QUEUE_SIZE, f"{at}.max_queue_size", least=1)
    return Ordering(
        mode=choice_at(fields.get("mode", "serial"), ("serial", "release"), f"{at}.mode"),
        max_queue_size=size,
        max_wait_ms=count_at(fields.get("max_wait_ms", 0), MAX_WAIT_MS, f"{at}.max_wait_ms"),
        on_store_down=choice_at(fields.get("on_store_down", "refuse"), ("refuse", "local"), f"{at}.on_store_down"),
    )


def _cache(entry: object, at: str) -> Cache:
    fields = mapping_at(entry, at)
    only_known(fields, ("ttl_s", "shared_by", "single_flight"), at)
    return Cache(
        ttl_s=count_at(fields.get("ttl_s"), MAX_TTL_S, f"{at}.ttl_s", least=1),
        shared_by=choice_at(fields.get("shared_by", "tenant"), ("tenant", "all"), f"{at}.shared_by"),
        single_flight=flag_at(fields.get("single_flight", False), f"{at}.single_flight"),
    )
