"""Tokens of an OpenID Connect issuer, and how its public keys are read and kept."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.admin.access import issuer_keys
from gateway.admin.access.issuer_keys import AGAIN_S, FIRST_AGAIN_S, FRESH_S, MAX_STALE_S, IssuerKeys
from gateway.admin.access.oidc import LEEWAY_S, Oidc
from gateway.core.errors import Forbidden, GatewayError, RulesUnavailable, Unauthorized
from gateway.settings.admin import OidcSettings
from tests.kit.issuer import AUDIENCE, Issuer, ec_jwk, jwk

DEEP = base64.urlsafe_b64encode(b"[" * 9000).decode() + ".e30.x"
ROLES = {"ops": "operator", "root": "admin", "look": "viewer"}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Desk:
    """Who checks tokens, with a clock of the test's own."""

    def __init__(self, issuer: Issuer, http: httpx.AsyncClient) -> None:
        self.issuer, self.http, self.clock = issuer, http, Clock()
        self.oidc = self.with_settings()

    def with_settings(self, *, url: str | None = None, **settings) -> Oidc:
        written = {"issuer": self.issuer.url, "audience": AUDIENCE, "roles": ROLES, **settings}
        keys = IssuerKeys(self.http, issuer=written["issuer"], url=url, clock=self.clock)
        return Oidc(OidcSettings(**written), keys)

    async def actor(self, **claims):
        return await self.oidc.actor(self.issuer.token(**claims), address="192.0.2.1")

    async def refused(self, error: type[GatewayError] = Unauthorized, **claims) -> str:
        with pytest.raises(error) as caught:
            await self.actor(**claims)
        return caught.value.detail

    @property
    def reads(self) -> int:
        return self.issuer.asked.count("/keys")


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with Issuer() as issuer, httpx.AsyncClient(timeout=None, trust_env=False) as http:  # noqa: S113 - on loopback
        yield Desk(issuer, http)


async def test_a_token_says_who_and_as_what(desk):
    actor = await desk.actor(sub="ana@example", roles=["look", "root", "other"])
    assert (actor.id, actor.role, actor.kind, actor.address) == ("oidc:ana@example", "admin", "oidc", "192.0.2.1")


async def test_a_token_by_an_elliptic_curve(desk):
    assert (await desk.actor(algorithm="ES256", key="curve", kid="curve")).role == "operator"


@pytest.mark.parametrize(
    ("claim", "claims", "role"),
    [
        ("roles", {"roles": "ops"}, "operator"),
        ("roles", {"roles": "look root"}, None),
        ("roles", {"roles": [1, None, {"ops": 1}]}, None),
        ("realm_access.roles", {"realm_access": {"roles": ["root"]}}, "admin"),
        ("realm_access.roles", {"realm_access": "root"}, None),
        ("https://a.example/roles", {"https://a.example/roles": ["look"]}, "viewer"),
    ],
)
async def test_where_the_roles_are(desk, claim, claims, role):
    desk.oidc = desk.with_settings(roles_claim=claim)
    if role is None:
        assert await desk.refused(Forbidden, **claims) == "the token has none of the roles that may enter"
    else:
        assert (await desk.actor(**claims)).role == role


async def test_clocks_may_differ_a_little(desk):
    now = int(time.time())
    assert (await desk.actor(exp=now - LEEWAY_S + 20, nbf=now + LEEWAY_S - 20)).id == "oidc:ana"
    await desk.refused(exp=now - LEEWAY_S - 1)
    await desk.refused(nbf=now + LEEWAY_S + 20)


async def test_the_audience_may_be_one_of_many(desk):
    assert (await desk.actor(aud=["other", AUDIENCE])).id == "oidc:ana"
    await desk.refused(aud=["other"])


@pytest.mark.parametrize("claims", [{"sub": ""}, {"sub": 7}, {"sub": "a\nb"}, {"sub": "a" * 201}, {"exp": "soon"}])
async def test_claims_of_another_kind_are_refused(desk, claims):
    if claims.get("sub") == 7:  # the library that signs refuses to
        claims = {"sub": ["ana"]}
    try:
        await desk.refused(**claims)
    except TypeError:
        pytest.fail("an error of the library came through")


@pytest.mark.parametrize("token", ["..", "a.b.c", "e30.e30.", "." * 3, "\u00e9.x.y", "x" * 20_000 + ".b.c", DEEP])
async def test_what_is_no_token_is_refused_without_asking_the_issuer(desk, token):
    with pytest.raises(Unauthorized):
        await desk.oidc.actor(token, address="")
    assert desk.issuer.asked == []


async def test_a_secret_among_the_keys_checks_nothing(desk):
    desk.issuer.keys = [{"kty": "oct", "k": "c2VjcmV0", "kid": "one", "alg": "RS256"}]
    await desk.refused()


@pytest.mark.parametrize("fields", [{"use": "enc"}, {"alg": "RS512"}, {"key_ops": ["encrypt"]}, {"kty": "EC"}])
async def test_a_key_for_something_else_checks_nothing(desk, fields):
    desk.issuer.keys = [jwk("one") | fields]
    await desk.refused()


async def test_a_broken_key_is_a_refusal_of_its_tokens(desk):
    desk.issuer.keys = [{**jwk("one"), "n": "!"}, ec_jwk("curve")]
    await desk.refused()
    assert (await desk.actor(algorithm="ES256", key="curve", kid="curve")).id == "oidc:ana"


async def test_a_token_may_leave_out_its_key_where_there_is_one_only(desk):
    assert (await desk.actor(kid=None)).id == "oidc:ana"
    desk.issuer.keys = [jwk("one"), jwk("two")]
    desk.clock.now_s += FRESH_S
    await desk.refused(kid=None)


# --- the issuer's keys -----------------------------------------------------------------------------


async def test_keys_are_kept_for_five_minutes(desk):
    for _ in range(3):
        await desk.actor()
    assert desk.issuer.asked == ["/.well-known/openid-configuration", "/keys"]
    desk.clock.now_s += FRESH_S - 1
    await desk.actor()
    assert desk.reads == 1
    desk.clock.now_s += 1
    await desk.actor()
    assert desk.reads == 2


async def test_many_at_once_read_once(desk):
    await asyncio.gather(*(desk.actor() for _ in range(20)))
    assert desk.reads == 1


async def test_a_new_key_is_found_and_unknown_ones_are_not_asked_for_again_and_again(desk):
    await desk.actor()
    desk.issuer.keys.append(jwk("two"))
    desk.clock.now_s += AGAIN_S
    assert (await desk.actor(kid="two", key="two")).id == "oidc:ana"
    assert desk.reads == 2
    for n in range(10):
        await desk.refused(kid=f"made up {n}")
    assert desk.reads == 2
    desk.clock.now_s += AGAIN_S
    await desk.refused(kid="made up")
    await desk.refused(kid="made up")
    assert desk.reads == 3


async def test_a_key_that_is_taken_back_is_good_no_more(desk):
    await desk.actor()
    desk.issuer.keys = [jwk("two")]
    desk.clock.now_s += FRESH_S
    await desk.refused()


async def test_while_the_issuer_is_away_its_last_keys_are_good_for_a_day(desk):
    await desk.actor()
    desk.issuer.is_away = True
    for _ in range(3):
        desk.clock.now_s += FRESH_S
        assert (await desk.actor()).id == "oidc:ana"
    asked = len(desk.issuer.asked)
    await desk.actor()
    assert len(desk.issuer.asked) == asked  # it was tried just now
    desk.clock.now_s += MAX_STALE_S
    await desk.refused(RulesUnavailable)
    desk.issuer.is_away = False
    desk.clock.now_s += AGAIN_S
    assert (await desk.actor()).id == "oidc:ana"


async def test_an_issuer_that_was_never_there_is_not_the_callers_fault(desk):
    desk.issuer.is_away = True
    assert await desk.refused(RulesUnavailable) == "the token issuer's keys cannot be read now"
    desk.issuer.is_away = False
    await desk.refused(RulesUnavailable)
    desk.clock.now_s += FIRST_AGAIN_S
    assert (await desk.actor()).id == "oidc:ana"


async def test_an_issuer_that_does_not_answer_has_so_long(desk, monkeypatch):
    monkeypatch.setattr(issuer_keys, "FETCH_S", 0.05)

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    async with server:
        desk.oidc = desk.with_settings(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/keys")
        await desk.refused(RulesUnavailable)


@pytest.mark.parametrize(
    "configuration",
    [
        None,
        [],
        {},
        {"issuer": "https://another.example", "jwks_uri": "URL/keys"},
        {"issuer": "URL", "jwks_uri": "URL/nothing"},
        {"issuer": "URL", "jwks_uri": "ftp://x"},
        {"issuer": "URL", "jwks_uri": "URL/.well-known/openid-configuration"},
        {"issuer": "URL", "jwks_uri": "URL/keys", "padding": "x" * issuer_keys.MAX_BYTES},
    ],
)
async def test_a_configuration_that_is_none(desk, configuration):
    url = desk.issuer.url
    if isinstance(configuration, dict):
        configuration = {name: value.replace("URL", url) for name, value in configuration.items()}
    desk.issuer.documents["/.well-known/openid-configuration"] = configuration
    await desk.refused(RulesUnavailable)


async def test_where_the_keys_are_can_be_told(desk):
    desk.issuer.documents = {}
    desk.oidc = desk.with_settings(url=f"{desk.issuer.url}/keys")
    assert (await desk.actor()).id == "oidc:ana"
    assert desk.issuer.asked == ["/keys"]


async def test_what_is_wrong_is_logged_without_the_token(desk, caplog):
    caplog.set_level("INFO", logger="gateway")
    token = desk.issuer.token(aud="other")
    with pytest.raises(Unauthorized) as caught:
        await desk.oidc.actor(token, address="")
    assert caught.value.detail == "missing or unknown admin token"
    (record,) = [record for record in caplog.records if record.name.startswith("gateway")]
    assert (record.message, record.fault) == ("admin_token_refused", "InvalidAudienceError")
    assert token.rpartition(".")[2] not in str(vars(record))
