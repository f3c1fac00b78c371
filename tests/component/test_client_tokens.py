"""`POST /v1/client-tokens`, and what a page may do with one."""

import hashlib
import json
import time
from datetime import datetime

import pytest
from websockets.asyncio.client import connect as websocket

from gateway.api.auth import KeptSecret, KeyRing
from gateway.backends.scripted import ScriptedBackend
from gateway.core import client_tokens
from gateway.core.types import Caller, Limit
from tests.component.test_stream import told
from tests.kit import stateful
from tests.kit.app import EMBEDDING_KEY, KEY, embedding, running
from tests.kit.keys import EMBED, TEXT, made
from tests.kit.stateful import StatefulBackend

pytest_plugins = ["tests.kit.redis", "tests.kit.key_fixtures"]

PAGE, OTHER = "https://app.example", "https://evil.example"
SIGNING = b"s" * 32
KEPT = KeptSecret(SIGNING).signing


def ring(*, signing=KEPT, **fields) -> KeyRing:
    """A ring with one key of the configuration."""
    callers = {KEY: Caller(key_id="one", tenant="t1", **fields), EMBEDDING_KEY: Caller(key_id="e", tenant="t2")}
    return KeyRing(
        {hashlib.sha256(key.encode()).hexdigest(): caller for key, caller in callers.items()}, signing=signing
    )


def gateway(**fields):
    return running([ScriptedBackend("triton", [embedding()])], key_ring=ring(**fields))


def as_page(token: str, origin: str = PAGE) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", "origin": origin}


async def minted(gw, **wish) -> dict:
    answer = await gw.post("/v1/client-tokens", wish)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_server_gets_a_token_and_its_page_uses_it():
    async with gateway() as gw:
        before_s = time.time()
        answer = await gw.post("/v1/client-tokens", {"tasks": ["text-embedding"], "origins": [PAGE], "minutes": 5})
        document = answer.json()
        assert answer.headers["cache-control"] == "no-store"
        assert document["token"].startswith("gwt_")
        assert document["expires_in"] == 300
        assert datetime.fromisoformat(document["expires_at"]).timestamp() == pytest.approx(before_s + 300, abs=5)
        assert {name: document[name] for name in ("key_id", "tasks", "models", "limits", "origins")} == {
            "key_id": "one",
            "tasks": ["text-embedding"],
            "models": None,
            "limits": [],
            "origins": [PAGE],
        }
        used = await gw.post(EMBED, TEXT, **as_page(document["token"]))
        assert used.status_code == 200
        assert (gw.seen.records[-1].key_id, gw.seen.records[-1].tenant) == ("one", "t1")


async def test_without_a_wish_a_token_is_as_its_key_for_ten_minutes():
    async with gateway() as gw:
        answer = await gw.http.post("/v1/client-tokens")
        assert answer.status_code == 201
        assert answer.json()["expires_in"] == 600
        token = answer.json()["token"]
        shown = {"authorization": f"Bearer {token}"}
        assert (await gw.post(EMBED, TEXT, **shown)).status_code == 200  # no origin: it is bound to none


@pytest.mark.parametrize("headers", [{}, {"origin": OTHER}, {"origin": "null"}, {"origin": PAGE + ":8443"}])
async def test_a_token_for_a_page_is_nothing_without_it(headers):
    async with gateway() as gw:
        token = (await minted(gw, origins=[PAGE]))["token"]
        answer = await gw.post(EMBED, TEXT, **{"authorization": f"Bearer {token}", **headers})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


async def test_a_token_is_never_wider_than_its_key():
    async with gateway(tasks=frozenset({"general_llm"}), origins=frozenset({PAGE}), models=frozenset({"m"})) as gw:
        for wish, field in (
            ({"tasks": ["text-embedding"]}, "tasks.0"),
            ({"models": ["m", "other"]}, "models.1"),
            ({"origins": [OTHER]}, "origins.0"),
        ):
            refused = await gw.post("/v1/client-tokens", wish)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
            assert field in refused.text
        document = await minted(gw)
        assert (document["tasks"], document["origins"], document["models"]) == (["general_llm"], [PAGE], ["m"])
        assert (await gw.post(EMBED, TEXT, **as_page(document["token"]))).status_code == 403


async def test_a_token_neither_makes_others_nor_controls_models():
    async with gateway(is_admin=True) as gw:
        shown = as_page((await minted(gw))["token"])
        assert (await gw.post("/v1/client-tokens", {}, **shown)).status_code == 403
        assert (await gw.post("/v2/repository/index", {}, **shown)).status_code == 403


async def test_a_tokens_limits_count_for_it_beside_those_of_its_key():
    of_key = (Limit(kind="requests", amount=5, per="minute", burst=5),)
    async with gateway(limits=of_key) as gw:
        first, second = [as_page((await minted(gw, limits=[{"requests": 2, "per": "minute"}]))["token"]) for _ in "ab"]
        assert [(await gw.post(EMBED, TEXT, **first)).status_code for _ in range(3)] == [200, 200, 429]
        assert [(await gw.post(EMBED, TEXT, **second)).status_code for _ in range(3)] == [200, 200, 429]
        # Four of the key's five are gone.
        assert [(await gw.post(EMBED, TEXT)).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(
    ("wish", "status", "field"),
    [
        ({"minutes": 0}, 422, "minutes"),
        ({"minutes": 61}, 422, "minutes"),
        ({"minutes": "5"}, 422, "minutes"),
        ({"tasks": []}, 422, "tasks"),
        ({"tasks": ["no-such-task"]}, 422, "tasks.0"),
        ({"origins": ["https://app.example/path"]}, 422, "origins.0"),
        ({"origins": ["*"]}, 422, "origins.0"),
        ({"limits": [{"requests": 1}]}, 422, "limits.0"),
        ({"limits": [{"concurrent": 1, "task": "no-such-task"}]}, 422, "limits.0.task"),
        ({"limits": [{"requests": 1, "per": "day", "shared_by": "tenant"}]}, 422, "limits.0.shared_by"),
        ({"admin": True}, 422, "admin"),
        ({"models": ["m" * 128] * 40}, 422, None),
    ],
)
async def test_a_wish_that_cannot_be_met_is_told(wish, status, field):
    async with gateway() as gw:
        refused = await gw.post("/v1/client-tokens", wish)
    assert (refused.status_code, refused.json()["code"]) == (status, "invalid_input")
    assert field is None or field in refused.text
    assert "pydantic" not in refused.text


async def test_an_expired_or_forged_token_is_as_an_unknown_key():
    async with gateway() as gw:
        unknown = await gw.post(EMBED, TEXT, authorization="Bearer no-such-key")
        token = client_tokens.read((await minted(gw))["token"], SIGNING)
        past = client_tokens.ClientToken(id="t", key_id="one", proof=token.proof, until_s=int(time.time()))
        others = client_tokens.ClientToken(id="t", key_id="e", proof=token.proof, until_s=2**40)
        for text in (
            client_tokens.sign(past, SIGNING),
            client_tokens.sign(token, b"o" * 32),
            client_tokens.sign(others, SIGNING),  # made with one key, named after another
        ):
            answer = await gw.post(EMBED, TEXT, authorization=f"Bearer {text}")
            assert (answer.status_code, answer.json()) == (401, unknown.json())


async def test_where_workers_share_nothing_there_are_no_tokens():
    async with gateway(signing=None) as gw:
        refused = await gw.post("/v1/client-tokens", {})
        assert (refused.status_code, refused.json()["code"]) == (501, "unsupported")
        answer = await gw.post(EMBED, TEXT, authorization="Bearer gwt_e30.AAAA")
        assert answer.status_code == 401


async def test_a_page_gives_its_token_to_a_socket():
    backend = StatefulBackend("triton", "a")
    async with running([backend], rules=stateful.RULES, more_tasks=stateful.TASKS, key_ring=ring()) as gw:
        token = (await minted(gw, tasks=["total"], origins=[PAGE]))["token"]
        url = gw.url.replace("http", "ws") + "/v1/tasks/total/stream"
        protocols = ["gateway.v1", f"bearer.{token}"]
        async with websocket(url, subprotocols=protocols, origin=PAGE, proxy=None) as socket:
            await socket.send(json.dumps({"input": {"number": 4}}))
            assert (await told(socket))["output"] == {"total": 4}
        with pytest.raises(Exception, match="403"):
            await websocket(url, subprotocols=protocols, origin=OTHER, proxy=None)


# --- with keys that were made at run time ---------------------------------------------------------


async def token_of(one, key: str) -> str:
    answer = await one.gw.http.post("/v1/client-tokens", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 201
    return answer.json()["token"]


@pytest.mark.parametrize("change", ["disable", "delete", "rotate"])
async def test_a_token_dies_with_its_key(admin, one, change):
    key = await made(admin)
    token = await token_of(one, key["key"])
    await one.becomes(200, token)
    if change == "disable":
        await admin.patch(f"/keys/{key['id']}", json={"disabled": True})
    elif change == "delete":
        await admin.delete(f"/keys/{key['id']}")
    else:
        await admin.post(f"/keys/{key['id']}/rotate")
    await one.becomes(401, token)


async def test_a_token_lives_through_the_grace_time_of_its_secret(admin, one):
    key = await made(admin)
    old = await token_of(one, key["key"])
    new_key = (await admin.post(f"/keys/{key['id']}/rotate", json={"grace_s": 120})).json()
    await one.becomes(200, new_key["key"])
    await one.becomes(200, old)
    answer = await one.gw.http.post("/v1/client-tokens", headers={"authorization": f"Bearer {key['key']}"})
    assert answer.json()["expires_in"] <= 120  # no longer than the secret that asks for it


async def test_a_key_that_becomes_narrower_narrows_its_tokens(admin, one):
    key = await made(admin)
    token = await token_of(one, key["key"])
    await admin.patch(f"/keys/{key['id']}", json={"tasks": ["general_llm"]})
    await one.becomes(403, token)
