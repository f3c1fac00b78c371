"""Client tokens: what they say, who signed it, and that they are never wider than their key."""

import base64
import hashlib
import hmac
import json
from dataclasses import replace

import pytest

from gateway.core import rate_limit
from gateway.core.client_tokens import MAX_TOKEN, PREFIX, ClientToken, narrowed, proof_of, read, sign
from gateway.core.types import Caller, Limit

SIGNING = b"s" * 32
FIVE = Limit(kind="requests", amount=5, per="minute", burst=5)
TOKEN = ClientToken(
    id="t1",
    key_id="k1",
    proof="p" * 16,
    until_s=5000,
    tasks=("a", "b"),
    models=("m",),
    limits=(FIVE,),
    origins=("https://a.example",),
)
CALLER = Caller(
    key_id="k1", tenant="acme", limits=(replace(FIVE, amount=9, burst=9),), tasks=frozenset({"b", "c"}), is_admin=True
)


@pytest.mark.parametrize("token", [TOKEN, ClientToken(id="t", key_id="k", proof="p", until_s=1)])
def test_a_token_is_read_as_it_was_signed(token):
    text = sign(token, SIGNING)
    assert text.startswith("gwt_")
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    assert read(text, SIGNING) == token


def test_another_secret_signs_nothing_here():
    assert read(sign(TOKEN, b"o" * 32), SIGNING) is None


def test_no_letter_of_a_token_can_be_changed():
    text = sign(TOKEN, SIGNING)
    for i in range(len(PREFIX), len(text)):
        changed = text[:i] + ("A" if text[i] != "A" else "B") + text[i + 1 :]
        assert read(changed, SIGNING) is None


@pytest.mark.parametrize("more", ["=", "~", "\n", " ", ".", ".x"])
def test_nothing_can_be_added_to_a_token(more):
    text = sign(TOKEN, SIGNING)
    assert read(text + more, SIGNING) is None
    assert read(text[:-1] + more + text[-1], SIGNING) is None


@pytest.mark.parametrize(
    "text", ["", "gwt_", "gwt_.", "gwt_a.b", "gwt_é.é", "gwt_e30", "gwt_" + "a" * MAX_TOKEN, "x.y"]
)
def test_what_is_no_token_is_none(text):
    assert read(text, SIGNING) is None


@pytest.mark.parametrize("document", [[], {}, {"id": "t"}, {"id": "t", "key": "k", "proof": "p", "until": 1, "new": 1}])
def test_a_signed_document_that_is_no_token_is_none(document):
    text = sign(TOKEN, SIGNING)
    assert read(text, SIGNING) is not None
    payload = base64.urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")
    assert read(_signed(payload), SIGNING) is None


def _signed(payload: str) -> str:

    mac = hmac.new(SIGNING, payload.encode(), hashlib.sha256).digest()
    return f"gwt_{payload}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


def test_a_token_has_what_both_it_and_its_key_allow():
    caller = narrowed(CALLER, TOKEN)
    assert caller.tasks == frozenset({"b"})
    assert caller.models == frozenset({"m"})
    assert caller.origins == frozenset({"https://a.example"})
    assert not caller.is_admin
    assert caller.token_id == "t1"  # noqa: S105 - an id
    assert (caller.key_id, caller.tenant) == ("k1", "acme")


def test_what_a_token_does_not_say_is_as_the_key_has_it():
    plain = ClientToken(id="t", key_id="k1", proof="p", until_s=1)
    caller = narrowed(replace(CALLER, origins=frozenset({"https://b.example"})), plain)
    assert caller.tasks == CALLER.tasks
    assert caller.models is None
    assert caller.origins == frozenset({"https://b.example"})
    assert caller.limits == CALLER.limits


def test_a_tokens_limits_count_for_it_and_its_keys_go_on_counting_for_the_key():
    def counters(caller):
        return [take.key for take in rate_limit.counters(caller, "b", "", "interactive")]

    first, second = (counters(narrowed(CALLER, replace(TOKEN, id=name))) for name in ("t1", "t2"))
    assert first[0] == second[0] == counters(CALLER)[0]
    assert first[1] != second[1]
    assert len(first) == len(second) == 2


def test_the_proof_tells_nothing_of_what_is_kept():
    kept = "ab" * 32
    assert proof_of(SIGNING, kept) == proof_of(SIGNING, kept)
    assert proof_of(SIGNING, kept) != proof_of(b"o" * 32, kept)
    assert kept[:8] not in proof_of(SIGNING, kept)
