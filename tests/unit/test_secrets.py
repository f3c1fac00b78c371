"""Secrets out of variables and out of files, and what is said where neither can be used: never the secret itself."""

import hashlib

import pytest
from typer.testing import CliRunner

from gateway.__main__ import app
from gateway.cli.admin_client import Failure, admin_of
from gateway.settings import ConfigError, load_settings
from gateway.settings.secrets import MOST_BYTES, from_environment
from gateway.wiring import callers_of

SECRET = "canary-of-a-file-41"  # noqa: S105 - made up here
WHOLE = """\
backends:
  llm: {kind: openai, base_url: "${LLM_URL}", api_key_env: A_KEY}
tasks: {chat: {contract: chat}}
rules: [{name: chat, split: [{backend: llm, model: m}]}]
redis: {url: "redis://h", password_env: R_PASSWORD}
server: {admin_token_env: ADMIN, client_token_secret_env: SIGNING}
keys: [{id: one, tenant: t, key_env: ONE}]
admin: {keys: [{id: two, role: viewer, key_env: TWO}]}
"""


@pytest.mark.parametrize("written", [SECRET, f"{SECRET}\n", f"{SECRET}\r\n"])
def test_a_file_is_as_good_as_a_variable(tmp_path, monkeypatch, written):
    file = tmp_path / "secret"
    file.write_bytes(written.encode())
    for name in ("A_KEY", "R_PASSWORD", "ADMIN", "SIGNING", "ONE", "TWO"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(f"{name}_FILE", str(file))
    (tmp_path / "url").write_text("http://llm/v1\n")
    monkeypatch.setenv("LLM_URL_FILE", str(tmp_path / "url"))
    long = tmp_path / "long"
    long.write_text(SECRET * 2)
    monkeypatch.setenv("SIGNING_FILE", str(long))
    (tmp_path / "gateway.yaml").write_text(WHOLE)
    settings = load_settings(tmp_path / "gateway.yaml")
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    assert settings.backends["llm"].base_url == "http://llm/v1"
    assert (
        settings.backends["llm"].api_key() == settings.redis.place.password == settings.server.admin_token() == SECRET
    )
    assert settings.keys[0].digest() == settings.admin.keys[0].digest() == digest
    assert settings.server.client_token_secret() == (SECRET * 2).encode()
    assert SECRET not in repr(settings)


def test_a_secret_ends_with_the_line_and_keeps_its_own_blanks(tmp_path, monkeypatch):
    (tmp_path / "s").write_bytes(b" a b \n\n")
    monkeypatch.setenv("S_FILE", str(tmp_path / "s"))
    assert from_environment("S") == " a b \n"


def test_commands_take_the_token_out_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "token").write_text(SECRET + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GATEWAY_ADMIN_TOKEN", raising=False)
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN_FILE", str(tmp_path / "token"))
    assert admin_of("http://h", "").token == SECRET
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(Failure, match="GATEWAY_ADMIN_TOKEN_FILE"):
        admin_of("http://h", "")


def broken(tmp_path, kind):
    """A file that is no secret's, and the words for it."""
    file = tmp_path / kind
    if kind == "binary":
        file.write_bytes(b"\xff\xfe" + SECRET.encode())
    elif kind == "long":
        file.write_text(SECRET * MOST_BYTES)
    elif kind == "folder":
        file.mkdir()
    return str(file)


@pytest.mark.parametrize("kind", ["missing", "binary", "long", "folder"])
def test_a_file_that_is_no_secrets_is_named_and_not_repeated(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("S_FILE", broken(tmp_path, kind))
    with pytest.raises(ConfigError) as refused:
        from_environment("S")
    assert str(refused.value).startswith("S_FILE: the file that it names ")
    assert SECRET not in str(refused.value)


def test_both_at_once_are_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setenv("S", SECRET)
    monkeypatch.setenv("S_FILE", broken(tmp_path, "missing"))
    with pytest.raises(ConfigError, match=r"^S and S_FILE are both set: leave one out$"):
        from_environment("S")


def test_check_names_each_secret_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_URL", "http://llm/v1")
    for name in ("A_KEY", "R_PASSWORD", "ADMIN", "SIGNING", "ONE", "TWO"):
        monkeypatch.setenv(f"{name}_FILE", str(tmp_path / "none"))
    path = tmp_path / "gateway.yaml"
    path.write_text(WHOLE)
    checked = CliRunner().invoke(app, ["check", str(path)])
    assert checked.exit_code == 78
    for name in ("A_KEY", "R_PASSWORD", "ADMIN", "SIGNING", "ONE", "TWO"):
        assert f"{name}_FILE: the file that it names cannot be read" in checked.output
    monkeypatch.delenv("LLM_URL")
    monkeypatch.setenv("LLM_URL_FILE", str(tmp_path / "none"))
    assert f"{path}:2: LLM_URL_FILE: " in CliRunner().invoke(app, ["check", str(path)]).output


def test_two_keys_with_one_secret_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_URL", "http://llm/v1")
    monkeypatch.setenv("ONE", SECRET)
    monkeypatch.setenv("OTHER", SECRET)
    path = tmp_path / "gateway.yaml"
    path.write_text(WHOLE.replace("key_env: ONE}", "key_env: ONE}, {id: other, tenant: u, key_env: OTHER}"))
    with pytest.raises(ConfigError, match=r"^keys: 'one' and 'other' have the same secret$") as refused:
        callers_of(load_settings(path))
    assert SECRET not in str(refused.value)


def test_no_form_of_the_settings_shows_what_is_sent_to_an_endpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_URL", "http://llm/v1")
    monkeypatch.setenv("SENT", SECRET)
    path = tmp_path / "gateway.yaml"
    headers = "api_key_env: A_KEY, headers: {x-key: '${SENT}'}"
    url = "redis://user:${SENT}@h"
    text = WHOLE.replace("api_key_env: A_KEY", headers).replace(
        'url: "redis://h", password_env: R_PASSWORD', f'url: "{url}"'
    )
    path.write_text(text)
    settings = load_settings(path)
    assert (settings.backends["llm"].headers["x-key"], settings.redis.place.password) == (SECRET, SECRET)
    assert SECRET not in f"{settings!r}{settings}{settings.backends['llm']!r}{settings.redis!r}{settings.redis.place!r}"
    path.write_text(text.replace("x-key", "content-length").replace("redis://user", "redix://user"))
    with pytest.raises(ConfigError) as refused:
        load_settings(path)
    assert "headers" in str(refused.value)
    assert "redis.url" in str(refused.value)
    assert SECRET not in str(refused.value)
