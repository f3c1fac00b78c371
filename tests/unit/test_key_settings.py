"""The configuration of keys, client tokens and CORS."""

import pytest
from pydantic import ValidationError

from gateway.core.types import Caller, Limit
from gateway.settings import ConfigError, KeySettings, LimitSettings
from gateway.settings import ServerSettings as Server

DIGEST = "ab" * 32
ONE = {"id": "one", "tenant": "acme", "key_sha256": DIGEST}


def test_a_key_is_a_caller():
    limits = (LimitSettings(requests=5, per="minute"),)
    assert KeySettings(**ONE).caller(limits) == Caller(
        key_id="one", tenant="acme", limits=(Limit(kind="requests", amount=5, per="minute", burst=5),)
    )
    narrow = {"limits": [], "tasks": ["t"], "models": ["org/m"], "priority": "batch", "origins": ["http://[::1]:3000"]}
    assert KeySettings(**ONE, **narrow, admin=True).caller(limits) == Caller(
        key_id="one",
        tenant="acme",
        tasks=frozenset({"t"}),
        models=frozenset({"org/m"}),
        is_admin=True,
        priority="batch",
        origins=frozenset({"http://[::1]:3000"}),
    )


@pytest.mark.parametrize(
    "origin",
    ["https://a.example/", "https://A.example", "a.example", "null", "*", "https://a.example:0", "ftp://a.example", ""],
)
def test_an_origin_is_as_browsers_send_it(origin):
    told = "must be as browsers send it: https://app.example"
    with pytest.raises(ValidationError, match=told) as refused:
        KeySettings(**ONE, origins=[origin])
    assert refused.value.errors()[0]["loc"] == ("origins", 0)
    if origin != "*":
        with pytest.raises(ValidationError, match=told) as refused:
            Server(cors_origins=[origin])
        assert [fault["loc"] for fault in refused.value.errors()] == [("cors_origins", 0)]


def test_any_page_may_be_let_in():
    assert Server(cors_origins=["*", "https://a.example:8443"]).cors_origins == ("*", "https://a.example:8443")


def test_what_signs_client_tokens_is_long_enough(monkeypatch):
    server = Server(client_token_secret_env="SIGNING")  # noqa: S106 - the name of a variable
    monkeypatch.delenv("SIGNING", raising=False)
    assert server.client_token_secret() == b""
    monkeypatch.setenv("SIGNING", "s" * 31)
    with pytest.raises(ConfigError, match="SIGNING"):
        server.client_token_secret()
    monkeypatch.setenv("SIGNING", "s" * 32)
    assert server.client_token_secret() == b"s" * 32
