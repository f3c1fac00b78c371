"""`POST /v1/client-tokens`: short-lived tokens for web pages, made by a web application's server with its key."""

import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from pydantic import Field, ValidationError

from gateway.api.answers import json_answer
from gateway.api.auth import Identity, shown_key
from gateway.api.body import json_object
from gateway.api.endpoint import Visit
from gateway.core.client_tokens import MAX_TOKEN, ClientToken
from gateway.core.errors import Forbidden, InvalidInput
from gateway.http.exchange import Response
from gateway.settings import LimitSettings
from gateway.settings.access import ModelName, Origin
from gateway.settings.faults import fault_words
from gateway.settings.section import Section

MAX_MINUTES: Final = 60
DEFAULT_MINUTES: Final = 10
_ID_BYTES: Final = 9


class Wish(Section):
    """What the token shall be for; whatever is left out is as the key has it."""

    tasks: tuple[str, ...] | None = Field(default=None, min_length=1, max_length=64)
    models: tuple[ModelName, ...] | None = Field(default=None, min_length=1, max_length=64)
    limits: tuple[LimitSettings, ...] = Field(default=(), max_length=8)
    origins: tuple[Origin, ...] | None = Field(default=None, min_length=1, max_length=16)
    minutes: int = Field(default=DEFAULT_MINUTES, ge=1, le=MAX_MINUTES, strict=True)


async def create(visit: Visit) -> Response:
    """201 with the token, which is never wider than the key and ends with it."""
    if visit.caller.token_id:
        raise Forbidden("a client token may not make others: that takes the key itself")
    wish = _wish(json_object(visit.headers, visit.body) if visit.body else {})
    keys = visit.api.keys
    identity = await keys.identify(shown_key(visit.scope, visit.headers))
    _check(visit, wish, identity)
    now_s = int(time.time())
    until_s = now_s + wish.minutes * 60
    token = ClientToken(
        id=secrets.token_urlsafe(_ID_BYTES),
        key_id=identity.caller.key_id,
        proof=await keys.proof(identity),
        until_s=until_s if identity.until_s is None else min(until_s, identity.until_s),
        tasks=wish.tasks,
        models=wish.models,
        limits=tuple(limit.limit() for limit in wish.limits),
        origins=wish.origins,
    )
    text = await keys.sign(token)
    if len(text) > MAX_TOKEN:
        raise InvalidInput(
            f"the token would have more than {MAX_TOKEN} characters: name fewer tasks, models or origins"
        )
    document = {
        "id": token.id,
        "token": text,
        "expires_at": datetime.fromtimestamp(token.until_s, UTC).isoformat().replace("+00:00", "Z"),
        "expires_in": token.until_s - now_s,
        "key_id": token.key_id,
        "tasks": _listed(wish.tasks, identity.caller.tasks),
        "models": _listed(wish.models, identity.caller.models),
        "limits": [limit.model_dump(mode="json", exclude_none=True) for limit in wish.limits],
        "origins": _listed(wish.origins, identity.caller.origins),
    }
    response = json_answer(document)
    response.status_code = 201
    response.headers["cache-control"] = "no-store"
    return response


def _wish(document: Mapping[str, object]) -> Wish:
    try:
        return Wish.model_validate(document)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_url=False)[0]
        at = ".".join(str(part) for part in fault["loc"])[:128]
        raise InvalidInput(fault_words(fault), field=at or None) from None


def _check(visit: Visit, wish: Wish, identity: Identity) -> None:
    """Refuse what the key may not itself: a narrower token than the one wished for would be a riddle to its page."""
    caller = identity.caller
    named = [(f"tasks.{i}", task) for i, task in enumerate(wish.tasks or ())]
    named += [(f"limits.{i}.task", limit.task) for i, limit in enumerate(wish.limits) if limit.task]
    for place, task in named:
        if task not in visit.api.pipeline.tasks:
            raise InvalidInput("there is no such task; GET /v1/tasks lists them", field=place)
    pairs: tuple[tuple[str, Sequence[str] | None, frozenset[str] | None], ...] = (
        ("tasks", wish.tasks, caller.tasks),
        ("models", wish.models, caller.models),
        ("origins", wish.origins, caller.origins),
    )
    for field, wished, allowed in pairs:
        for i, name in enumerate(wished or ()):
            if allowed is not None and name not in allowed:
                raise Forbidden("the key itself may not have this", field=f"{field}.{i}")
    for i, limit in enumerate(wish.limits):
        if limit.shared_by != "key":
            raise InvalidInput("a token's limits are its own", field=f"limits.{i}.shared_by")


def _listed(wished: Sequence[str] | None, allowed: frozenset[str] | None) -> list[str] | None:
    names = wished if wished is not None else allowed
    return None if names is None else sorted(names)
