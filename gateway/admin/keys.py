"""The control plane's paths about keys: made, listed, changed, rotated and deleted while everything runs."""

import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response

from gateway.admin.access.door import CurrentVisit
from gateway.admin.document import refuses
from gateway.admin.etags import IfMatch, revision_of, set_etag
from gateway.admin.fields import PAGE_SIZE, KeyPath
from gateway.admin.key_bodies import KeyChange, KeyIn, KeyMade, KeyOut, KeyRotation, KeysOut, key_out
from gateway.admin_ports import KeyStore
from gateway.core.error_forms import pointer
from gateway.core.errors import InvalidInput, RulesUnavailable, StaleRevision, TooManyKeys, UnknownKey
from gateway.core.keys import ID_BYTES, LAST_S, NAME, SALT_BYTES, SECRET_BYTES, ApiKey, new_id, new_secret, rotated

MAX_PAGE: Final = 500
DEFAULT_PAGE: Final = 100
_CURSOR: Final = r"^[0-9]{12}:[a-z2-7]{13}$"
_ADMIN, _TASK, _MODEL = "admin", "task:", "model:"


def key_routes(store: KeyStore, tasks: Collection[str]) -> APIRouter:
    """`/keys`. `tasks` are those that there are."""
    router = APIRouter(tags=["keys"])

    @router.post("/keys", status_code=201, openapi_extra=refuses(TooManyKeys))
    async def post_key(body: KeyIn, response: Response, visit: CurrentVisit) -> KeyMade:
        """Make a key. Its secret is in this answer and nowhere else."""
        key_id = new_id(secrets.token_bytes(ID_BYTES))
        text, secret = _secret_for(key_id)
        key = ApiKey(
            id=key_id,
            tenant=body.tenant,
            secrets=(secret,),
            created_s=int(time.time()),
            **{"name": body.name, **_fields(body, tasks)},
        )
        await store.create(key)
        visit.tell("key.create", key_id, after=_shown(key))
        return _made(key, text, response)

    @router.get("/keys")
    async def get_keys(
        tenant: Annotated[str, Query(description="only this tenant's")] = "",
        after: Annotated[str, Query(alias="cursor", description="`next` of the page before", pattern=_CURSOR)] = "",
        size: Annotated[int, Query(alias="limit", ge=1, le=MAX_PAGE, description=PAGE_SIZE)] = DEFAULT_PAGE,
    ) -> KeysOut:
        """The keys, in the order in which they were made."""
        found, following = await store.page(after=after, size=size, tenant=tenant)
        return KeysOut(items=[key_out(key) for key in found], next=following)

    @router.get("/keys/{key_id}", openapi_extra=refuses(UnknownKey))
    async def get_key(key_id: KeyPath, response: Response) -> KeyOut:
        """One key, with its revision as the ETag."""
        return _told(await store.get(key_id), response)

    @router.patch("/keys/{key_id}", openapi_extra=refuses(UnknownKey, StaleRevision))
    async def patch_key(
        key_id: KeyPath, body: KeyChange, response: Response, visit: CurrentVisit, if_match: IfMatch = None
    ) -> KeyOut:
        """Change a key; all workers know within a second."""
        if "name" in body.model_fields_set and body.name is None:
            raise InvalidInput("#/name: must be a text", field="name")
        changes = _fields(body, tasks)
        before: list[ApiKey] = []

        def change(key: ApiKey) -> ApiKey:
            before.append(key)
            return replace(key, **changes)

        changed = await store.change(key_id, change, expected_revision=revision_of(if_match))
        was, now = _shown(before[-1]), _shown(changed)
        names = [name for name in now if was[name] != now[name]]
        visit.tell("key.change", key_id, before={n: was[n] for n in names}, after={n: now[n] for n in names})
        return _told(changed, response)

    @router.post("/keys/{key_id}/rotate", openapi_extra=refuses(UnknownKey, StaleRevision))
    async def rotate_key(
        key_id: KeyPath,
        response: Response,
        visit: CurrentVisit,
        body: KeyRotation | None = None,
        if_match: IfMatch = None,
    ) -> KeyMade:
        """Give a key a new secret; the one before is good for `grace_s` more, by default not at all."""
        text, secret = _secret_for(key_id)
        grace_s, now_s = (body or KeyRotation()).grace_s, int(time.time())
        changed = await store.change(
            key_id,
            lambda key: rotated(key, secret, now_s=now_s, grace_s=grace_s),
            expected_revision=revision_of(if_match),
        )
        visit.tell("key.rotate", key_id, after={"grace_s": grace_s, "revision": changed.revision})
        return _made(changed, text, response)

    @router.delete("/keys/{key_id}", status_code=204, response_class=Response, openapi_extra=refuses(UnknownKey))
    async def delete_key(key_id: KeyPath, visit: CurrentVisit) -> None:
        """Take a key away for good; what it has used stays in the books."""
        before = await _known(store, key_id)
        await store.delete(key_id)
        visit.tell("key.delete", key_id, before=before)

    return router


def _secret_for(key_id: str) -> tuple[str, Any]:
    return new_secret(key_id, secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SALT_BYTES))


def _shown(key: ApiKey) -> dict[str, Any]:
    """What the audit log says of a key: all of it but its secrets."""
    return key_out(key).model_dump(mode="json")


async def _known(store: KeyStore, key_id: str) -> dict[str, Any] | None:
    """The same of a stored key; None of one that cannot be read, which can be deleted all the same."""
    try:
        return _shown(await store.get(key_id))
    except RulesUnavailable:
        return None


def _made(key: ApiKey, text: str, response: Response) -> KeyMade:
    response.headers["cache-control"] = "no-store"
    return KeyMade.model_validate({**_told(key, response).model_dump(), "key": text})


def _told(key: ApiKey, response: Response) -> KeyOut:
    set_etag(response, key.revision)
    return key_out(key)


def _fields(body: KeyChange, tasks: Collection[str]) -> dict[str, Any]:
    """The fields of a key that a body sets. Raises `InvalidInput` for tasks that there are not."""
    given = {name: getattr(body, name) for name in body.model_fields_set}
    fields: dict[str, Any] = {
        name: given[name] for name in ("name", "tasks", "models", "priority", "origins") if name in given
    }
    if "scopes" in given:
        if given.keys() & {"tasks", "models", "admin"}:
            raise InvalidInput("#/scopes: give either scopes or tasks, models and admin", field="scopes")
        fields |= _of_scopes(given["scopes"])
    if "admin" in given:
        fields["is_admin"] = given["admin"]
    if "disabled" in given:
        fields["is_disabled"] = given["disabled"]
    if "limits" in given:
        limits = given["limits"]
        fields["limits"] = None if limits is None else tuple(limit.limit() for limit in limits)
    if "expires_at" in given:
        expires = given["expires_at"]
        fields["expires_s"] = None if expires is None else _instant_s(expires.timestamp())
    field = "scopes" if "scopes" in given else "tasks"
    named = [(f"{field}.{i}", task) for i, task in enumerate(fields.get("tasks") or ())]
    named += [(f"limits.{i}.task", limit.task) for i, limit in enumerate(given.get("limits") or ()) if limit.task]
    for place, task in named:
        if task not in tasks:
            raise InvalidInput(f"{pointer(place)}: there is no task '{task}'"[:300], field=place)
    return fields


def _of_scopes(scopes: tuple[str, ...] | None) -> Mapping[str, Any]:
    """None restricts nothing, and gives no more than a plain key has."""
    named = [scope for scope in scopes or () if scope != _ADMIN]
    models = tuple(scope.removeprefix(_MODEL) for scope in named if scope.startswith(_MODEL))
    for model in models:
        if not NAME.fullmatch(model):
            raise InvalidInput("#/scopes: not the name of a model", field="scopes")
    found = tuple(scope.removeprefix(_TASK) for scope in named if not scope.startswith(_MODEL))
    return {"tasks": found or None, "models": models or None, "is_admin": _ADMIN in (scopes or ())}


def _instant_s(seconds: float) -> int:
    if not 0 <= seconds <= LAST_S:
        raise InvalidInput("#/expires_at: must be of the years 1970 to 9999 (UTC)", field="expires_at")
    return int(seconds)
