"""Backends of generative models as they come out of a configuration file."""

from contextlib import AsyncExitStack

import pytest
import yaml

from gateway.settings import ConfigError, load_settings
from gateway.wiring import check
from gateway.wiring_backends import open_backends

KINDS = {
    "one": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1"},
    "pool": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1,http://127.0.0.1:2/v1"},
    "claude": {"kind": "anthropic", "hosted": True, "api_key_env": "TEST_CLAUDE_KEY"},
    "generate": {"kind": "triton_generate", "base_url": "http://127.0.0.1:3", "chat_template": "own.jinja"},
}


def configured(folder, backends=KINDS, rules=(), **sections):
    (folder / "own.jinja").write_text("{{ messages[0].content }}")
    path = folder / "gateway.yaml"
    tasks = {"chat": {"contract": "chat", "aliases": ["small"]}, "embed": {"contract": "text-embedding"}}
    path.write_text(yaml.safe_dump({"backends": backends, "tasks": tasks, "rules": list(rules), **sections}))
    return load_settings(path)


async def test_every_kind_is_built_and_one_whose_key_is_not_set_is_off(tmp_path, monkeypatch):
    settings = configured(tmp_path)
    for key, names in ((None, {"one", "pool", "generate"}), ("", {"one", "pool", "generate"}), ("sk", {*KINDS})):
        if key is not None:
            monkeypatch.setenv("TEST_CLAUDE_KEY", key)
        async with AsyncExitStack() as stack:
            backends = await open_backends(settings, stack)
            assert backends.keys() == names
            assert {backend.speaks for backend in backends.values()} == {"openai"}
            assert list(backends["pool"].replicas()) == ["127.0.0.1:1", "127.0.0.1:2"]
            assert {n for n, backend in backends.items() if not backend.is_probed} == names & {"claude"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"base_url": "ftp://x/v1"}, "must be http(s) URLs"),
        ({"base_url": "http://a/v1,http://a/v1"}, "names one endpoint twice"),
        ({"base_url": "http://a/v1?x=1"}, "must be http(s) URLs"),
        ({"apis": ["chat"]}, "backends.llm.apis"),
        ({"idle_timeout_ms": 0}, "backends.llm.idle_timeout_ms"),
        ({"usd_per_hour": -1}, "backends.llm.usd_per_hour"),
        ({"hostd": True}, "backends.llm.hostd: unknown field"),
    ],
)
def test_mistakes_are_named(tmp_path, change, text):
    with pytest.raises(ConfigError) as refused:
        configured(tmp_path, {"llm": {"kind": "openai", "base_url": "http://a/v1", **change}})
    assert text in str(refused.value)


async def test_a_template_that_is_not_there_is_named(tmp_path):
    settings = configured(tmp_path, {"generate": {**KINDS["generate"], "chat_template": "missing.jinja"}})
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"backends\.generate: chat_template .*missing\.jinja"):
            await open_backends(settings, stack)


RULE = {"name": "r", "match": {"task": "chat"}, "split": [{"backend": "one", "model": "m"}]}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"strategy": "cheapest"}, "needs a price of 'm' on 'one'"),
        ({"match": {"task": "embed"}, "split": [{"backend": "triton", "model": "m"}]}, None),
        ({"split": [{"backend": "triton", "model": "m"}]}, "cannot be answered by a model server"),
        ({"split": [{"backend": "one", "model": "*"}]}, None),
    ],
)
def test_rules_are_held_against_kinds_and_prices(tmp_path, rule, text):
    backends = {**KINDS, "triton": {"kind": "triton", "url": "a:1"}}
    settings = configured(tmp_path, backends, [{**RULE, **rule}])
    if text is None:
        check(settings)
    else:
        with pytest.raises(ConfigError, match=text):
            check(settings)


@pytest.mark.parametrize(
    ("table", "text"), [("prices: {m: {inptu: 1}}", "m"), ("prices: [", "not valid YAML"), (None, "No such file")]
)
def test_a_price_table_that_cannot_be_read_is_named(tmp_path, table, text):
    if table is not None:
        (tmp_path / "prices.yaml").write_text(table)
    with pytest.raises(ConfigError, match=text) as refused:
        check(configured(tmp_path, rules=[RULE], prices="prices.yaml"))
    assert "prices.yaml" in str(refused.value)


def test_a_priced_model_may_be_the_cheapest(tmp_path):
    (tmp_path / "prices.yaml").write_text("prices: {m: {input: 1, output: 2}}")
    check(configured(tmp_path, rules=[{**RULE, "strategy": "cheapest"}], prices="prices.yaml"))
