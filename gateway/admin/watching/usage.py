"""The control plane's path about usage: the books of all workers, summed up as the caller wants them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from gateway.admin.fields import Body, Next
from gateway.admin_ports import UsageRow, UsageSource
from gateway.core.cost import NANO_USD_PER_USD
from gateway.core.errors import InvalidInput

MAX_DAYS: Final = 400  # as long as days are kept
DIMENSIONS: Final = ("tenant", "task", "backend", "model", "day")
_PARAMETERS: Final = ("from", "to", "by")
_SUMMED: Final = (
    "requests",
    "failed",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "estimated_requests",
    "cost_nano_usd",
)


class UsageOut(Body):
    """One group: the names that were asked for in `by`, and its sums."""

    tenant: str | None = Field(None, description="where it is asked for in `by`, as the four below")
    task: str | None = Field(None, description="its name")
    backend: str | None = Field(None, description="its name")
    model: str | None = Field(None, description="its name")
    day: date | None = Field(None, description="in UTC")
    requests: int = Field(description="that were answered, or used something up")
    failed: int = Field(description="of them, those that came to no good end")
    input_tokens: int = Field(description="all tokens that were read, cached ones included")
    output_tokens: int = Field(description="all tokens that were made, reasoning included")
    cached_tokens: int = Field(description="a part of input_tokens")
    reasoning_tokens: int = Field(description="a part of output_tokens")
    estimated_requests: int = Field(description="those whose tokens are an estimate, as the backend did not tell")
    cost_usd: float = Field(description="US dollars, exact to 1e-9; what has no price costs nothing here")


class UsagesOut(BaseModel):
    """Groups in the order of their names; those in which nothing was used are not there."""

    items: list[UsageOut] = Field(description="in the order of their names")
    next: Next


def usage_routes(source: UsageSource) -> APIRouter:
    """`/usage`."""
    router = APIRouter(tags=["usage"])

    @router.get("/usage", response_model_exclude_unset=True)
    async def get_usage(
        request: Request,
        first: Annotated[str | None, Query(alias="from", description="first day, YYYY-MM-DD; default: today")] = None,
        last: Annotated[str | None, Query(alias="to", description="last day; default: today")] = None,
        by: Annotated[str, Query(description="what to sum by: tenant, task, backend, model, day")] = "tenant,task",
    ) -> UsagesOut:
        """What was used up and what it cost, from one day to another, both included. Days are in UTC."""
        for name in request.query_params:
            if name not in _PARAMETERS:
                raise InvalidInput(f"unknown parameter; there are {', '.join(_PARAMETERS)}", field=name[:64])
        today = datetime.now(UTC).date()
        last_day = _day(last, "to", today)
        first_day = _day(first, "from", min(today, last_day))
        _check_span(first_day, last_day)
        groups = _dimensions(by)
        return UsagesOut(items=list(_items(await source.read(first_day, last_day), groups)), next=None)

    return router


def _day(text: str | None, field: str, default: date) -> date:
    if text is None:
        return default
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date()
    except ValueError:
        raise InvalidInput(f"{field}: must be a day such as 2026-01-31", field=field) from None


def _check_span(first: date, last: date) -> None:
    if first > last:
        raise InvalidInput(f"from: {first} is after the last day, {last}", field="from")
    if (last - first).days >= MAX_DAYS:
        raise InvalidInput(f"from: more than {MAX_DAYS} days are asked for; no day is kept for longer", field="from")


def _dimensions(by: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in by.split(",")))
    if not set(names) <= set(DIMENSIONS):
        raise InvalidInput(f"by: must be some of {', '.join(DIMENSIONS)}, separated by commas", field="by")
    return names


def _items(rows: Iterable[UsageRow], by: Sequence[str]) -> Iterator[UsageOut]:
    sums: dict[tuple[str | date, ...], list[int]] = defaultdict(lambda: [0] * len(_SUMMED))
    for row in rows:
        group = sums[tuple(getattr(row, name) for name in by)]
        for i, name in enumerate(_SUMMED):
            group[i] += getattr(row, name)
    for key in sorted(sums):
        yield _item(dict(zip(by, key, strict=True)), dict(zip(_SUMMED, sums[key], strict=True)))


def _item(names: Mapping[str, str | date], sums: dict[str, int]) -> UsageOut:
    # A quotient of two integers is the float nearest to it, so it prints as the exact figure.
    cost_usd = sums.pop("cost_nano_usd") / NANO_USD_PER_USD
    return UsageOut.model_validate({**names, **sums, "cost_usd": cost_usd})
