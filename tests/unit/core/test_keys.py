"""What a key is, and what its document may say."""

import json
from dataclasses import replace

import pytest

from gateway.core.keys import (
    LAST_S,
    ApiKey,
    KeyFault,
    caller_of,
    is_usable,
    key_document,
    new_id,
    new_secret,
    parse_key,
    proven,
    rotated,
    split_key,
)
from gateway.core.types import Caller, Limit

PER_MINUTE = Limit(kind="requests", amount=3, per="minute", burst=3)
ID = new_id(b"\x01" * 8)


def made(n: int = 1) -> tuple[str, str, ApiKey]:
    """A key's text, its secret, and the key."""
    text, secret = new_secret(ID, bytes([n]) * 32, bytes([n]) * 16)
    key = ApiKey(id=ID, tenant="acme", name="web", secrets=(secret,), created_s=1000)
    return text, split_key(text)[1], key


def test_a_keys_text_tells_its_id_and_its_secret():
    text, secret, _ = made()
    assert text == f"gw_{ID}_{secret}"
    assert split_key(text) == (ID, secret)
    assert len(secret) == 43  # 32 bytes


@pytest.mark.parametrize(
    "text",
    ["", "gw_", "sk-abc", made()[0] + "x", made()[0][:-1], made()[0].upper(), made()[0] + "\n", "gwt_a.b", "gw_é_é"],
)
def test_anything_else_is_no_key(text):
    assert split_key(text) is None


def test_only_the_secret_proves_a_key():
    _, secret, key = made()
    assert proven(key, secret, 0) == key.secrets[0]
    assert proven(key, made(2)[1], 0) is None


def test_the_secret_is_not_kept():
    text, secret, key = made()
    kept = json.dumps(key_document(key))
    assert secret not in kept
    assert text not in kept
    assert made(2)[2].secrets[0].digest not in kept


def test_the_same_secret_with_another_salt_is_kept_otherwise():
    first, second = (new_secret(ID, b"\x01" * 32, salt * 16)[1] for salt in (b"\x01", b"\x02"))
    assert first.digest != second.digest


def test_a_rotated_key_has_its_old_secret_for_the_grace_time_alone():
    _, old, key = made()
    _, new, other = made(2)
    after = rotated(key, other.secrets[0], now_s=100, grace_s=60)
    assert proven(after, new, 1e9)
    assert proven(after, old, 159)
    assert proven(after, old, 160) is None
    assert proven(rotated(key, other.secrets[0], now_s=100, grace_s=0), old, 100) is None


def test_a_key_that_is_rotated_twice_has_two_secrets():
    key = made()[2]
    for n in (2, 3):
        key = rotated(key, made(n)[2].secrets[0], now_s=n, grace_s=60)
    assert [proven(key, made(n)[1], 10) is not None for n in (1, 2, 3)] == [False, True, True]


def test_a_key_is_usable_until_it_expires_or_is_disabled():
    key = replace(made()[2], expires_s=50)
    assert is_usable(key, 49.9)
    assert not is_usable(key, 50)
    assert not is_usable(replace(key, is_disabled=True), 0)


def test_its_caller_has_the_configurations_limits_where_it_has_none():
    key = made()[2]
    assert caller_of(key, (PER_MINUTE,)) == Caller(key_id=ID, tenant="acme", limits=(PER_MINUTE,))
    assert caller_of(replace(key, limits=()), (PER_MINUTE,)).limits == ()
    scoped = replace(key, tasks=("a",), models=("m",), origins=("https://a.example",), priority="batch", is_admin=True)
    assert caller_of(scoped, ()) == Caller(
        key_id=ID,
        tenant="acme",
        tasks=frozenset({"a"}),
        models=frozenset({"m"}),
        origins=frozenset({"https://a.example"}),
        priority="batch",
        is_admin=True,
    )


WHOLE = replace(
    made()[2],
    tasks=("a", "b"),
    models=("org/m",),
    limits=(PER_MINUTE, Limit(kind="concurrent", amount=2), Limit(kind="usd", amount=5, per="month")),
    origins=("https://a.example:8443", "http://localhost:3000", "http://[::1]:80"),
    expires_s=2000,
    is_disabled=True,
    priority="batch",
)


@pytest.mark.parametrize("key", [made()[2], WHOLE, rotated(WHOLE, made(2)[2].secrets[0], now_s=1, grace_s=9)])
def test_a_document_is_read_as_it_was_written(key):
    assert parse_key(json.loads(json.dumps(key_document(key)))) == key


@pytest.mark.parametrize(
    ("at", "value", "named"),
    [
        (("id",), "no id", "id"),
        (("tenant",), "a{b}", "tenant"),
        (("name",), None, "name"),
        (("secrets",), [], "secrets"),
        (("secrets",), {}, "secrets"),
        (("secrets", 0), "x", "secrets[0]"),
        (("secrets", 0, "salt"), "zz", "secrets[0].salt"),
        (("secrets", 0, "digest"), "é" * 64, "secrets[0].digest"),
        (("secrets", 0, "until_s"), -1, "secrets[0].until_s"),
        (("created_s",), 1.5, "created_s"),
        (("tasks",), "a", "tasks"),
        (("models", 0), 7, "models[0]"),
        (("origins", 0), "https://a.example/path", "origins[0]"),
        (("origins", 0), "null", "origins[0]"),
        (("is_admin",), 1, "is_admin"),
        (("is_disabled",), None, "is_disabled"),
        (("priority",), "urgent", "priority"),
        (("expires_s",), True, "expires_s"),
        (("revision",), None, "revision"),
        (("limits",), 1, "limits"),
        (("limits", 0, "kind"), "bananas", "limits[0]"),
        (("limits", 0, "per"), "century", "limits[0]"),
        (("limits", 0, "burst"), 0, "limits[0]"),
        (("limits", 0, "burst"), 2**52, "limits[0]"),
        (("limits", 0, "amount"), 0, "limits[0]"),
        (("limits", 0, "amount"), 10**9 + 1, "limits[0]"),
        (("limits", 0, "task"), "a\r\nb", "limits[0].task"),
        (("limits", 0, "priority"), "urgent", "limits[0].priority"),
        (("limits", 1, "per"), "day", "limits[1]"),
        (("limits", 1, "amount"), 10**6 + 1, "limits[1]"),
        (("limits", 2, "per"), "minute", "limits[2]"),
        (("limits", 2, "burst"), 1, "limits[2]"),
        (("limits", 2, "amount"), 10**15 + 1, "limits[2]"),
        (("created_s",), LAST_S + 1, "created_s"),
        (("expires_s",), LAST_S + 1, "expires_s"),
        (("secrets", 0, "until_s"), LAST_S + 1, "secrets[0].until_s"),
        (("limits", 0, "shared_by"), "all", "limits[0].shared_by"),
        (("limits", 0, "shared_by"), "token", "limits[0].shared_by"),
        (("limits", 0, "surprise"), 1, "limits[0]"),
        (("narrower",), True, "key"),
    ],
)
def test_a_document_that_cannot_be_read_whole_is_no_key(at, value, named):
    document = json.loads(json.dumps(key_document(WHOLE)))
    inner = document
    for part in at[:-1]:
        inner = inner[part]
    inner[at[-1]] = value
    with pytest.raises(KeyFault) as refused:
        parse_key(document)
    assert str(refused.value).startswith(f"{named}:")


@pytest.mark.parametrize("document", [None, [], "key", 1])
def test_what_is_no_object_is_no_key(document):
    with pytest.raises(KeyFault):
        parse_key(document)
