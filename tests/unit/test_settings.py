"""Configuration: what is taken, what is refused, and that every refusal has its line."""

import hashlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.__main__ import app
from gateway.settings import ConfigError, LocalSettings, load_settings

GOOD = """\
backends:
  triton: {kind: triton, url: "${TRITON_URL:-127.0.0.1:8001}"}
  local:
    kind: local
    repository: models
tasks:
  text-embedding: {contract: text-embedding, aliases: [minilm]}
rules:
  - name: embeddings
    match: {task: text-embedding}
    split: [{backend: triton, model: text_embedding}]
limits:
  - {per: minute, requests: 60}
keys:
  - {id: dev, tenant: dev, key_env: DEV_KEY}
"""


def load(tmp_path: Path, text: str):
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    return load_settings(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    return str(refused.value).replace(str(tmp_path / "gateway.yaml"), "FILE")


def test_a_good_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_URL", "triton:9001")
    monkeypatch.setenv("DEV_KEY", "secret")
    settings = load(tmp_path, GOOD)
    assert settings.backends["triton"].url == "triton:9001"
    local = settings.backends["local"]
    assert isinstance(local, LocalSettings)
    assert local.repository == tmp_path / "models"
    assert settings.keys[0].digest() == hashlib.sha256(b"secret").hexdigest()
    assert not settings.keys[0].admin
    limit = settings.limits[0].limit()
    assert (limit.requests, limit.period_us, limit.burst) == (60, 60_000_000, 60)


def test_defaults_stand_in_for_unset_and_empty_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_URL", "")
    monkeypatch.delenv("DEV_KEY", raising=False)
    settings = load(tmp_path, GOOD)
    assert settings.backends["triton"].url == "127.0.0.1:8001"
    assert settings.keys[0].digest() is None  # a key whose secret is not set lets nobody in


def test_the_shipped_file_is_good():
    settings = load_settings(Path(__file__).parents[2] / "deploy" / "gateway.yaml")
    assert set(settings.tasks) == {
        *("text-embedding", "custom_nlu", "image-classification", "image-embedding", "ocr"),
        *("speech-activity", "tensor", "general_llm", "code_generation", "vision"),
        *("bulk_llm", "realtime_llm", "top_quality"),
    }


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("url:", "uri:", "FILE:2: backends.triton"),
        ("kind: local", "kind: loca", "FILE:3: backends.local"),
        ("text_embedding}]", "text_embedding, wieght: 3}]", "did you mean 'weight'"),
        (
            "{backend: triton, model",
            "{backend: tritn, model",
            "FILE:9: rule 'embeddings': split[0].backend: unknown backend 'tritn' (did you mean 'triton'?)",
        ),
        ("task: text-embedding}", "task: text-embeding}", "unknown task 'text-embeding'"),
        ("model: text_embedding}", 'model: "*"}', "FILE:9: rule 'embeddings': split[0].model: callers of the task"),
        ("requests: 60", "requests: 0", "FILE:13: limits.0.requests"),
        ("per: minute", "per: fortnight", "FILE:13: limits.0.per"),
        (", key_env: DEV_KEY", "", "FILE:15: keys.0: give either key_env or key_sha256"),
        ("limits:", "limit:", "FILE:12: limit: unknown field"),
        ("contract: text-embedding,", "", "FILE:7: tasks.text-embedding.contract: is required"),
    ],
)
def test_a_fault_is_told_with_its_line(tmp_path, old, new, line):
    assert line in refusal(tmp_path, GOOD.replace(old, new))


def test_a_variable_that_is_not_set_and_has_no_default_is_a_fault(tmp_path):
    text = GOOD.replace("requests: 60", 'requests: "${NOWHERE_SET}"')
    assert "FILE:13: the environment variable NOWHERE_SET is not set" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("{kind: openai, base_url: 'http://h/v1?x=1'}", "must be http(s) URLs"),
        ("{kind: openai, base_url: 'ftp://h/v1'}", "must be http(s) URLs"),
        ("{kind: openai, base_url: 'http://user:secret@h/v1'}", "must be http(s) URLs"),
        ("{kind: openai, base_url: 'http://h/v1,'}", "must be http(s) URLs"),
        ("{kind: openai, base_url: 'http://h/v1 x'}", "must be http(s) URLs"),
        ("{kind: openai, base_url: 'http://h/vü'}", "must be http(s) URLs"),
        ("{kind: openai, base_url: 'http://h/v1/chat/completions'}", "llm.base_url: ends before /chat/completions"),
        ("{kind: openai, base_url: 'http://h/v1', api_key_env: sk-secret}", "llm.api_key_env: is no variable's name"),
        ("{kind: openai, base_url: 'http://h:0/v1'}", "llm.base_url: no server has the port 0"),
        ("{kind: openai, base_url: 'http://h:99999/v1'}", "llm.base_url: Port out of range"),
        ("{kind: openai, base_url: 'http://h/v1, http://h/v1'}", "llm.base_url: names one endpoint twice"),
        ("{kind: openai, base_url: 'http://h/v1', headers: {Content-Length: '5'}}", "llm.headers: 'Content-Length'"),
        ("{kind: openai, base_url: 'http://h/v1', apis: []}", "llm.apis: Tuple should have at least 1 item"),
    ],
)
def test_addresses_are_checked(tmp_path, backend, told):
    text = GOOD.replace("tasks:", f"  llm: {backend}\ntasks:")
    assert told in refusal(tmp_path, text)
    assert "secret" not in refusal(tmp_path, text)


def test_the_store_is_a_redis(tmp_path):
    assert "FILE:16: redis.url: must begin with redis://" in refusal(tmp_path, GOOD + "redis: {url: 'http://x'}\n")


def test_one_name_for_two_tasks_is_refused(tmp_path):
    text = GOOD.replace("rules:", "  other: {contract: text-embedding, aliases: [minilm]}\nrules:")
    assert "the name 'minilm' stands for two tasks" in refusal(tmp_path, text)


@pytest.mark.parametrize(("text", "told"), [("a: [", "not valid YAML"), ("- a", "must be a mapping"), ("", "mapping")])
def test_what_is_no_configuration_at_all(tmp_path, text, told):
    assert told in refusal(tmp_path, text)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(tmp_path / "none.yaml")


def test_a_check_tells_which_endpoints_are_off_and_why(tmp_path, monkeypatch):
    monkeypatch.setenv("SET_KEY", "x")
    monkeypatch.delenv("UNSET_KEY", raising=False)
    endpoint = "kind: openai, base_url: 'http://h/v1'"
    lines = (
        f"  keyed: {{{endpoint}, api_key_env: SET_KEY}}",
        f"  keyless: {{{endpoint}, api_key_env: UNSET_KEY}}",
        f"  disabled: {{{endpoint}, enabled: false}}",
    )
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD.replace("tasks:", "\n".join(lines) + "\ntasks:"))
    told = CliRunner().invoke(app, ["check", str(path)])
    assert told.exit_code == 0
    assert told.output.splitlines()[1:] == ["off: keyless (UNSET_KEY is not set)", "off: disabled (not enabled)"]
