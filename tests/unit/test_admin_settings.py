"""The section `admin`, and what becomes of it."""

import hashlib
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from gateway.admin.access.opening import open_entry
from gateway.admin.access.roles import ROWS
from gateway.admin.watching.audit import AuditOut
from gateway.settings import AdminSettings, ConfigError, Settings, load_settings
from gateway.settings.admin import OidcSettings

SHA = hashlib.sha256(b"secret").hexdigest()
OIDC = {"issuer": "https://id.example/realms/ops", "audience": "gateway", "roles": {"ops": "operator"}}
REST = {"backends": {"t": {"kind": "triton", "url": "t:8001"}}, "tasks": {}, "rules": []}


def key(**fields):
    return {"id": "ci", "key_sha256": SHA, "role": "operator", **fields}


def test_nothing_is_needed():
    admin = AdminSettings()
    assert (admin.keys, admin.oidc, admin.session_ttl_s) == ((), None, 28_800)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"keys": [key(role="root")]}, "viewer"),
        ({"keys": [key(key_env="CI")]}, "give either key_env or key_sha256"),
        ({"keys": [key(key_sha256=None)]}, "give either key_env or key_sha256"),
        ({"keys": [key(), key()]}, "two have the id 'ci'"),
        ({"keys": [key(id="admin")]}, "taken by the gateway itself"),
        ({"keys": [key(id="guard")]}, "taken by the gateway itself"),
        ({"keys": [key(id="oidc:ana")]}, "match pattern"),
        ({"keys": [key(other="s")]}, "Extra inputs"),
        ({"session_ttl_s": 1}, "greater than or equal to 60"),
        ({"oidc": {**OIDC, "issuer": "id.example"}}, "must be an address"),
        ({"oidc": {**OIDC, "issuer": "https://id.example/?a=b"}}, "must be an address"),
        ({"oidc": {**OIDC, "issuer": "http://id.example"}}, "must be https://: the issuer's keys decide who enters"),
        ({"oidc": {**OIDC, "issuer": "http://localhost@id.example"}}, "must be https://"),
        ({"oidc": {**OIDC, "jwks_url": "http://127.0.0.1.id.example/keys"}}, "must be https://"),
        ({"oidc": {**OIDC, "roles": {}}}, "at least 1"),
        ({"oidc": {**OIDC, "roles": {"a": "root"}}}, "viewer"),
        ({"oidc": {**OIDC, "algorithms": ["HS256"]}}, "RS256"),
        ({"oidc": {**OIDC, "algorithms": ["none"]}}, "RS256"),
        ({"oidc": {**OIDC, "algorithms": []}}, "at least 1"),
    ],
)
def test_faults_are_told(section, told):
    with pytest.raises(ValidationError) as caught:
        AdminSettings.model_validate(section)
    assert told in str(caught.value)
    assert SHA not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://localhost:1/a", "http://127.0.0.1:8/a", "http://[::1]:8/a", "https://id.example"]
)
def test_an_issuer_in_the_clear_is_on_this_host(url):
    oidc = AdminSettings.model_validate({"oidc": {**OIDC, "issuer": url, "jwks_url": url}}).oidc
    assert (oidc.issuer, oidc.jwks_url) == (url, url)


def test_a_fault_is_told_with_its_line(tmp_path):
    path = tmp_path / "gateway.yaml"
    lines = ["backends: {t: {kind: triton, url: 't:1'}}", "tasks: {}", "rules: []", "admin:", "  keys:"]
    path.write_text("\n".join([*lines, "    - {id: ci, role: boss, key_env: A}"]))
    with pytest.raises(ConfigError, match=r"gateway\.yaml:6: admin\.keys\.0\.role: must be 'viewer', 'operator' or"):
        load_settings(path)


async def opened(**admin):
    async with AsyncExitStack() as stack:
        return open_entry(Settings.model_validate({**REST, "admin": admin}), stack)


async def test_all_ways_in_are_opened(monkeypatch, caplog):
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", "the token")
    monkeypatch.setenv("CI_KEY", "another")
    keys = [key(), key(id="env", key_sha256=None, key_env="CI_KEY"), key(id="lost", key_sha256=None, key_env="NOT_SET")]
    entry = await opened(keys=keys, oidc=OIDC, session_ttl_s=60)
    assert [(one.id, one.role) for one in entry.keys] == [("admin", "admin"), ("ci", "operator"), ("env", "operator")]
    assert entry.oidc is not None
    assert entry.session_ttl_s == 60
    assert [record.key for record in caplog.records if "not set" in record.message] == ["lost"]
    assert (await entry.actor(b"another", address="")).id == "env"
    assert entry.key_of(b"") is None


async def test_a_key_that_may_be_found_by_trying_is_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", "short-secret")
    monkeypatch.setenv("LONG", "x" * 32)
    monkeypatch.setenv("SHORT", "x" * 31)
    keys = [{"id": name, "key_env": name.upper(), "role": "viewer"} for name in ("long", "short")]
    await opened(keys=keys)
    warned = [record.key for record in caplog.records if "short" in record.message]
    assert warned == ["admin", "short"]
    assert "short-secret" not in caplog.text


@pytest.mark.parametrize("admin", [{}, {"keys": [key(key_sha256=None, key_env="NOT_SET")]}])
async def test_where_nobody_could_enter_nothing_starts(monkeypatch, admin):
    monkeypatch.delenv("GATEWAY_ADMIN_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="GATEWAY_ADMIN_TOKEN"):
        await opened(**admin)


async def test_an_issuer_alone_is_a_way_in(monkeypatch):
    monkeypatch.delenv("GATEWAY_ADMIN_TOKEN", raising=False)
    assert (await opened(oidc=OIDC)).keys == ()


async def test_one_secret_has_one_role(monkeypatch):
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", "secret")
    with pytest.raises(ConfigError, match="two keys have the same secret"):
        await opened(keys=[key(role="viewer")])


MANUAL = (Path(__file__).parents[2] / "docs" / "access.md").read_text()


async def test_the_manuals_example_is_a_configuration(monkeypatch):
    monkeypatch.setenv("CI_ADMIN_KEY", "another")
    monkeypatch.setenv("GATEWAY_ADMIN_TOKEN", "the token")
    written = yaml.safe_load(re.search(r"```yaml\n(.*?)```", MANUAL, re.DOTALL)[1])
    entry = await opened(**written["admin"])
    assert [one.role for one in entry.keys] == ["admin", "operator", "viewer"]
    defaults = OidcSettings(**OIDC)
    assert tuple(written["admin"]["oidc"]["algorithms"]) == defaults.algorithms
    assert (entry.session_ttl_s, defaults.roles_claim) == (AdminSettings().session_ttl_s, "roles")


def test_the_manuals_entry_is_one_of_the_export():
    told = json.loads(re.search(r"^{\"id\".*$", MANUAL, re.MULTILINE)[0])
    fields = {field.serialization_alias or name for name, field in AuditOut.model_fields.items()}
    assert told.keys() == fields
    assert told["action"] in {row.action for row in ROWS}
