"""Models that rules name and no model server has: a warning before they are put in force, and no more than that."""

import pytest

from gateway.admin.models.absent import absent_models
from gateway.admin.models.fleet import Servers
from gateway.core.rules import parse_rules
from tests.kit.model_server import ModelServerFake


def rules(**fields):
    return parse_rules([{"name": "r", "split": [{"backend": "triton", "model": "m"}], **fields}])


def to(model: str, version: str = "", backend: str = "triton"):
    return {"split": [{"backend": backend, "model": model, "version": version}]}


@pytest.fixture
def triton():
    return ModelServerFake(replicas=("a", "b"))  # version 1 of `m` is ready, on both


@pytest.mark.parametrize(
    ("fields", "lack"),
    [
        (to("mm"), "has a model 'mm'"),
        (to("m", "9"), "serves version 9 of 'm' now; there are: 1"),
        ({"fallback": [{"backend": "triton", "model": "n"}]}, "has a model 'n'"),
        ({"shadow": {"backend": "triton", "model": "n"}}, "has a model 'n'"),
    ],
)
async def test_what_no_server_has_is_told(triton, fields, lack):
    (warning,) = await absent_models(Servers(reachable={"triton": triton}), rules(**fields))
    assert warning.startswith(f"rule 'r': no server of 'triton' {lack}")


@pytest.mark.parametrize(
    "fields", [to("m"), to("m", "1"), to("*"), to("n", backend="llm"), {**to("n"), "enabled": False}]
)
async def test_of_all_else_nothing_is_said(triton, fields):
    assert await absent_models(Servers(reachable={"triton": triton}), rules(**fields)) == []


async def test_one_server_with_it_is_enough_and_one_that_is_away_says_nothing(triton):
    servers = Servers(reachable={"triton": triton})
    triton.servers["a"].ready.clear()
    assert await absent_models(servers, rules(**to("m"))) == []
    triton.servers["b"].ready.clear()
    assert await absent_models(servers, rules(**to("m"))) == ["rule 'r': no server of 'triton' has 'm' loaded now"]
    triton.servers["b"].down = "gone"
    assert await absent_models(servers, rules(**to("m"))) == []
