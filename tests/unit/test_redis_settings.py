"""The section `redis`: every form of its url, what does not fit together, and that no secret is ever repeated."""

import pytest

from gateway.settings import ConfigError, RedisSettings, load_settings
from gateway.settings.redis import RedisPlace
from gateway.stores.redis_script import connect

GOOD = "backends: {}\ntasks: {}\nrules: []\nredis:\n"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://h", {"kind": "single", "nodes": (("h", 6379),)}),
        ("redis://:p%40w@h:1/2", {"kind": "single", "nodes": (("h", 1),), "db": 2, "password": "p@w"}),
        ("redis://h?db=3", {"kind": "single", "nodes": (("h", 6379),), "db": 3}),
        ("rediss://u:p@[::1]:7/", {"nodes": (("::1", 7),), "is_tls": True, "username": "u", "password": "p"}),
        ("unix:///run/redis.sock?db=3", {"kind": "unix", "path": "/run/redis.sock", "db": 3}),
        (
            "redis+sentinel://a:1,b/mymaster/2",
            {"kind": "sentinel", "nodes": (("a", 1), ("b", 26379)), "master": "mymaster", "db": 2},
        ),
        ("rediss+sentinel://a/m", {"kind": "sentinel", "nodes": (("a", 26379),), "master": "m", "is_tls": True}),
        ("redis+cluster://a:1,b", {"kind": "cluster", "nodes": (("a", 1), ("b", 6379))}),
        ("rediss+cluster://u@a/0", {"kind": "cluster", "nodes": (("a", 6379),), "is_tls": True, "username": "u"}),
    ],
)
def test_urls(url, place):
    assert RedisSettings(url=url).place == RedisPlace(**{"kind": "single", **place})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("url: http://secret", "redis.url: must begin with redis://"),
        ("url: redis://", "redis.url: must look like redis://"),
        ("url: redis://secret@", "redis.url: must look like redis://"),
        ("url: redis://h:99999", "redis.url: must look like redis://"),
        ("url: redis://u:sec/ret@h", "redis.url: must look like redis://"),
        ("url: redis://u:secret@h:port", "redis.url: must look like redis://"),
        ("url: redis://h/x", "redis.url: must look like redis://"),
        ("url: redis://h?ssl_cert_reqs=none", "redis.url: must look like redis://"),
        ("url: 'redis://a,b'", "redis.url: several servers are redis+sentinel://"),
        ("url: redis+sentinel://a", "redis.url: must name the master"),
        ("url: redis+cluster://a/1", "redis.url: a Redis Cluster has the database 0 alone"),
        ("url: unix://h/secret", "redis.url: must look like unix:///"),
        ("{url: 'redis://u@h', username: v}", "redis.username: the url names a user already"),
        ("{url: 'redis://:secret@h', password_env: V}", "redis.password_env: the url has a password already"),
        ("{url: 'redis://h', sentinel_password_env: V}", "redis.sentinel_password_env: the url names no sentinels"),
        ("{url: 'redis://h', ca_file: a}", "redis.ca_file: the url is not one for TLS (rediss://)"),
        ("{url: 'rediss://h', cert_file: a}", "redis: give both cert_file and key_file, or neither"),
        ("{url: 'redis://h', password: secret}", "redis.password: unknown field"),
    ],
)
def test_what_does_not_fit_is_named_and_no_secret_is_repeated(tmp_path, fields, told):
    file = tmp_path / "gateway.yaml"
    file.write_text(f"{GOOD}  {fields}\n")
    with pytest.raises(ConfigError) as refused:
        load_settings(file)
    assert told in str(refused.value)
    for text in (str(refused.value), repr(refused.value.__cause__)):
        assert "secret" not in text.replace("key_file", "")
        assert "sec/ret" not in text


def test_secrets_are_in_no_text(monkeypatch):
    monkeypatch.setenv("V", "secret")
    monkeypatch.setenv("W", "another-secret")
    settings = RedisSettings(url="redis+sentinel://a/m", username="u", password_env="V", sentinel_password_env="W")  # noqa: S106 - names of variables
    assert (settings.place.password, settings.place.sentinel_password) == ("secret", "another-secret")
    within = RedisSettings(url="redis://u:secret@h")
    for one in (settings, settings.place, within, within.place, connect(settings), connect(within)):
        assert "secret" not in repr(one)


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("V", raising=False)
    for field, url in (("password_env", "redis://h"), ("sentinel_password_env", "redis+sentinel://h/m")):
        with pytest.raises(ValueError, match=rf"redis\.{field}: the environment variable V is not set"):
            connect(RedisSettings(url=url, **{field: "V"}))


def test_files_begin_at_the_configuration_file(tmp_path):
    file = tmp_path / "gateway.yaml"
    file.write_text(f"{GOOD}  {{url: 'rediss://h', ca_file: ca.pem, cert_file: /x/c.pem, key_file: k.pem}}\n")
    redis = load_settings(file).redis
    assert (redis.ca_file, str(redis.cert_file), redis.key_file) == (
        tmp_path / "ca.pem",
        "/x/c.pem",
        tmp_path / "k.pem",
    )
