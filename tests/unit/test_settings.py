"""Configuration: what is taken, what is refused, and that every refusal has its line."""

import hashlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.__main__ import app
from gateway.core.types import Limit
from gateway.settings import ConfigError, LocalSettings, load_settings
from gateway.wiring import _labels, prices_of

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
    assert settings.limits[0].limit() == Limit(kind="requests", amount=60, per="minute", burst=60)


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
            "FILE:11: rule 'embeddings': split[0].backend: unknown backend 'tritn' (did you mean 'triton'?)",
        ),
        ("task: text-embedding}", "task: text-embeding}", "unknown task 'text-embeding'"),
        ("model: text_embedding}", 'model: "*"}', "FILE:11: rule 'embeddings': split[0].model: callers of the task"),
        ("requests: 60", "requests: 0", "FILE:13: limits.0.requests"),
        ("per: minute", "per: fortnight", "FILE:13: limits.0.per"),
        (", key_env: DEV_KEY", "", "FILE:15: keys.0: give either key_env or key_sha256"),
        ("limits:", "limit:", "FILE:12: limit: unknown field"),
        ("{per: minute, requests: 60}", "{per: minute, requests: 0}", "must be greater than or equal to 1"),
        ("  - {per: minute, requests: 60}", "  per: minute", "FILE:12: limits: must be a list"),
        ("requests: 60", "requests: many", "FILE:13: limits.0.requests: must be a whole number"),
        (
            "requests: 60",
            "requests: 60, task: text-embeding",
            "FILE:13: limits.0.task: unknown task 'text-embeding' (did",
        ),
        ("requests: 60", "requests: 60, task: minilm", "(that is an alias of the task 'text-embedding')"),
        # 0 is no bound in Triton's queue policies, and none here that could be kept: it is refused, not made another.
        (
            "    split:",
            "    ordering: {max_queue_size: 0}\n    split:",
            "ordering.max_queue_size: must be a whole number from 1",
        ),
        ("    split:", "    cache: {ttl_s: 0}\n    split:", "cache.ttl_s: must be a whole number from 1 to 2592000"),
        ("dev, key_env", "dev, tasks: [nope], key_env", "FILE:15: keys.0.tasks.0: unknown task 'nope'"),
        (
            "dev, key_env",
            "dev, limits: [{concurrent: 1, task: nope}], key_env",
            "FILE:15: keys.0.limits.0.task: unknown task 'nope'",
        ),
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
        ("{kind: openai, base_url: 'http://h/v1', apis: []}", "llm.apis: must have at least 1 item"),
    ],
)
def test_addresses_are_checked(tmp_path, backend, told):
    text = GOOD.replace("tasks:", f"  llm: {backend}\ntasks:")
    assert told in refusal(tmp_path, text)
    assert "secret" not in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("{kind: triton, url: 'h:1', tls: }", "FILE:3: backends.llm.tls: is empty"),
        ("{kind: triton, url: 'h:1,unix:/s', tls: {}}", "FILE:3: backends.llm.tls: a Unix socket has no TLS"),
        (
            "{kind: triton, url: 'h:1', tls: {cert_file: a}}",
            "FILE:3: backends.llm.tls: give both cert_file and key_file",
        ),
        ("{kind: triton, url: 'h:1', tls: {server_name: 'a b'}}", "backends.llm.tls.server_name: "),
        ("{kind: triton, url: 'h:1', tls: {verify: false}}", "backends.llm.tls.verify: unknown field"),
        ("{kind: triton, url: 'h:1', compression: gzip, tls: {}}", "FILE:3: backends.llm.compression: with `tls` it"),
        ("{kind: openai, base_url: 'http://h/v1', tls: {}}", "backends.llm.tls: the base_url is not one for TLS"),
        ("{kind: openai, base_url: 'https://h/v1,http://i/v1', tls: {}}", "the base_url is not one for TLS (https://)"),
        ("{kind: anthropic, base_url: 'https://h/v1', tls: }", "backends.llm.tls: is empty"),
    ],
)
def test_tls_that_would_be_none_or_does_not_fit_is_refused(tmp_path, backend, told):
    assert told in refusal(tmp_path, GOOD.replace("  local:", f"  llm: {backend}\n  local:"))


@pytest.mark.parametrize(
    "backend",
    [
        "{kind: triton, url: 'h:1', tls: {ca_file: ca.pem, cert_file: /x/c.pem, key_file: k.pem}}",
        "{kind: triton_generate, base_url: 'https://h', tls: {ca_file: ca.pem, cert_file: /x/c.pem, key_file: k.pem}}",
    ],
)
def test_certificates_lie_beside_the_file(tmp_path, backend):
    tls = load(tmp_path, GOOD.replace("  local:", f"  llm: {backend}\n  local:")).backends["llm"].tls
    assert (tls.ca_file, str(tls.cert_file), tls.key_file) == (tmp_path / "ca.pem", "/x/c.pem", tmp_path / "k.pem")
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "gateway.yaml")])
    assert (checked.exit_code, "backends.llm: tls.ca_file: cannot be read" in checked.output) == (78, True)


def test_check_names_what_goes_to_other_hosts_in_the_clear(tmp_path):
    more = """  near: {kind: openai, base_url: "http://127.0.0.1:1/v1,http://[::1]:1/v1"}
  far: {kind: openai, base_url: "https://h/v1,http://other/v1"}
  safe: {kind: triton, url: "h:1", tls: {}}
  here: {kind: triton, url: "unix:/s,localhost:1,[::1]:2"}
  away: {kind: triton, url: "localhost:1,h:1"}
  unused: {kind: triton, url: "h:1", enabled: false}
tasks:"""
    path = tmp_path / "gateway.yaml"
    for redis, told in (("redis://h", ", redis"), ("rediss://h", ""), ("redis://localhost", ""), ("unix:///s", "")):
        path.write_text(GOOD.replace("tasks:", more, 1) + f"redis: {{url: '{redis}'}}\n")
        checked = CliRunner().invoke(app, ["check", str(path)])
        assert f"other hosts: backends.far, backends.away{told} (docs/tls.md)" in checked.output
    path.write_text(GOOD)
    assert "in the clear" not in CliRunner().invoke(app, ["check", str(path)]).output


def test_the_store_is_a_redis(tmp_path):
    assert "FILE:16: redis.url: must begin with redis://" in refusal(tmp_path, GOOD + "redis: {url: 'http://x'}\n")


LIMITS = """\
  - {requests: 60, per: minute}
  - {requests: 600, per: hour, burst: 20, shared_by: tenant}
  - {tokens: 1000000, per: day, task: text-embedding, priority: batch}
  - {usd: 12.5, per: month, shared_by: all}
  - {usd: 0.0000000001, per: day}
  - {concurrent: 8, model: org/llama-3.1}
"""


def test_limits_of_all_kinds(tmp_path):
    settings = load(tmp_path, GOOD.replace("  - {per: minute, requests: 60}\n", LIMITS))
    assert [limit.limit() for limit in settings.limits] == [
        Limit(kind="requests", amount=60, per="minute", burst=60),
        Limit(kind="requests", amount=600, per="hour", burst=20, shared_by="tenant"),
        Limit(kind="tokens", amount=10**6, per="day", burst=10**6, task="text-embedding", priority="batch"),
        Limit(kind="usd", amount=12_500_000_000, per="month", shared_by="all"),
        Limit(kind="usd", amount=1, per="day"),  # the least that is counted
        Limit(kind="concurrent", amount=8, model="org/llama-3.1"),
    ]


def test_a_key_has_its_own_limits_or_those_of_all(tmp_path):
    own = GOOD.replace("key_env: DEV_KEY}", "key_env: DEV_KEY, limits: [{concurrent: 2}]}")
    settings = load(tmp_path, own + "  - {id: free, tenant: dev, key_env: FREE_KEY, limits: []}\n")
    own_limits, none = (key.caller(settings.limits).limits for key in settings.keys)
    assert (own_limits, none) == ((Limit(kind="concurrent", amount=2),), ())
    assert load(tmp_path, GOOD).keys[0].caller(settings.limits).limits == (settings.limits[0].limit(),)


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("{per: minute}", "limits.0: give one of requests, tokens, usd, concurrent"),
        ("{per: minute, requests: 1, tokens: 1}", "limits.0: give one of requests, tokens, usd, concurrent"),
        ("{requests: 5}", "limits.0: `requests` needs `per`"),
        ("{tokens: 5}", "limits.0: `tokens` needs `per`"),
        ("{usd: 5}", "limits.0: `usd` needs `per`"),
        ("{concurrent: 5, per: minute}", "limits.0: `concurrent` has no period"),
        ("{usd: 5, per: hour}", "limits.0: `usd` is per day or per month"),
        ("{requests: 5, per: month}", "limits.0: only `usd` is per month"),
        ("{tokens: 5, per: month}", "limits.0: only `usd` is per month"),
        ("{usd: 5, per: day, burst: 2}", "limits.0: `usd` has no burst"),
        ("{concurrent: 5, burst: 2}", "limits.0: `concurrent` has no burst"),
        ("{requests: 1, per: day, burst: 4000}", "limits.0: burst is too large for so few per period"),
        ("{requests: -1, per: day}", "limits.0.requests"),
        ("{requests: 1.5, per: day}", "limits.0.requests"),
        ("{tokens: 1000000000001, per: day}", "limits.0.tokens"),
        ("{usd: 0, per: day}", "limits.0.usd"),
        ("{usd: .nan, per: day}", "limits.0.usd"),
        ("{usd: .inf, per: day}", "limits.0.usd"),
        ("{concurrent: 0}", "limits.0.concurrent"),
        ("{requests: 1, per: day, burst: 0}", "limits.0.burst"),
        ("{requests: 1, per: day, task: 'a b'}", "limits.0.task"),
        ("{requests: 1, per: day, model: ''}", "limits.0.model"),
        ("{requests: 1, per: day, priority: low}", "limits.0.priority"),
        ("{requests: 1, per: day, shared_by: nobody}", "limits.0.shared_by"),
        ("{requests: 1, per: day, shared_by: token}", "limits.0.shared_by"),
        ("{request: 1, per: day}", "limits.0.request: unknown field"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused_and_its_field_named(tmp_path, limit, told):
    assert f"FILE:13: {told}" in refusal(tmp_path, GOOD.replace("{per: minute, requests: 60}", limit))


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
    monkeypatch.delenv("DEV_KEY", raising=False)
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
    assert told.output.splitlines()[1:] == [
        "off: keyless (UNSET_KEY is not set)",
        "off: disabled (not enabled)",
        "in the clear, to other hosts: backends.keyed, backends.keyless (docs/tls.md)",
        "off: key dev (DEV_KEY is not set)",
    ]


@pytest.mark.parametrize(
    ("redis", "told"),
    [
        ("{url: 'redis://h', password_env: UNSET}", "redis.password_env: the environment variable UNSET is not set"),
        ("{url: 'rediss://h', ca_file: none.pem}", "redis.ca_file: cannot be read as certificates (FileNotFoundError)"),
    ],
)
def test_a_check_refuses_a_store_that_nothing_would_start_with(tmp_path, monkeypatch, redis, told):
    monkeypatch.delenv("UNSET", raising=False)
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD + f"redis: {redis}\n")
    refused = CliRunner().invoke(app, ["check", str(path)])
    assert (refused.exit_code, refused.stderr.strip()) == (78, told)


@pytest.mark.parametrize(
    "url", ["redis://h", "unix:///s", "redis+sentinel://a,b/m", "redis+cluster://a,b", "rediss://h"]
)
def test_a_check_connects_to_no_store(tmp_path, url):
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD + f"redis: {{url: '{url}'}}\n")
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 0


def traces_of(tmp_path, monkeypatch, section: str = "{}", **variables: str):
    for name in ("SDK_DISABLED", "TRACES_EXPORTER", "EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    return load(tmp_path, GOOD + f"telemetry: {{traces: {section}}}\n").telemetry.traces


NAMED = "{endpoint: 'http://h:4318'}"


@pytest.mark.parametrize(
    ("section", "variables", "is_on"),
    [
        ("{}", {}, False),
        (NAMED, {}, True),
        ("{}", {"EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, True),
        ("{}", {"EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces"}, True),
        (NAMED, {"SDK_DISABLED": "true"}, False),
        (NAMED, {"TRACES_EXPORTER": "none"}, False),
        ("{sample_ratio: 1}", {}, False),
    ],
)
def test_traces_are_sent_where_a_receiver_is_named(tmp_path, monkeypatch, section, variables, is_on):
    assert traces_of(tmp_path, monkeypatch, section, **variables).is_on() is is_on


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("{endpoint: 'h:4318'}", "must be an http(s) URL"),
        ("{endpoint: 'http://user:pa55@h:4318'}", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("{sample_ratio: 2}", "less than or equal to 1"),
    ],
)
def test_what_cannot_be_traced_to_is_refused(tmp_path, section, told):
    found = refusal(tmp_path, GOOD + f"telemetry: {{traces: {section}}}\n")
    assert told in found
    assert "pa55" not in found


@pytest.mark.parametrize("by", ["file", "variable"])
def test_a_check_says_what_traces_need(tmp_path, monkeypatch, by):
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD + (f"telemetry: {{traces: {NAMED}}}\n" if by == "file" else ""))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4318")
    assert CliRunner().invoke(app, ["check", str(path)]).exit_code == 0
    monkeypatch.setattr("gateway.settings.traces._PACKAGES", ("opentelemetry.sdk.trace", "no_such_package.here"))
    refused = CliRunner().invoke(app, ["check", str(path)])
    where = "telemetry.traces.endpoint" if by == "file" else "OTEL_EXPORTER_OTLP_ENDPOINT"
    told = f"{where}: traces need the extra `otel`, which is not installed (docs/traces.md)"
    assert (refused.exit_code, refused.stderr.strip()) == (78, told)


@pytest.mark.parametrize("broken", [b"\xff\xfe", b"server: {host: '\xa3'}\n", b"\xed\xa0\x80"])
def test_a_file_that_is_no_text_is_told_as_one(tmp_path, broken):
    """A configuration in another encoding, and the files that one names."""
    path = tmp_path / "gateway.yaml"
    path.write_bytes(broken)
    with pytest.raises(ConfigError, match=r"gateway\.yaml: is not UTF-8 text"):
        load_settings(path)
    with pytest.raises(ConfigError, match=r"tasks\.t\.labels_file: .*gateway\.yaml: is not UTF-8 text"):
        _labels("t", path)
    settings = load(tmp_path, GOOD).model_copy(update={"prices": tmp_path / "prices.yaml"})
    (tmp_path / "prices.yaml").write_bytes(broken)
    with pytest.raises(ConfigError, match=r"prices: .*prices\.yaml: is not UTF-8 text"):
        prices_of(settings)
