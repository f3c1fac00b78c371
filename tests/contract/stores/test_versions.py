"""Two versions beside each other, as docs/upgrading.md promises: rules that only one of them can read."""

import json

import pytest

from gateway.core.rules import RuleSet
from tests.kit.rule_workers import BOUND_S, SEED, rules
from tests.kit.wait import until

pytest_plugins = ["tests.kit.redis", "tests.kit.rule_fixtures"]

TARGET = {"backend": "triton", "model": "m"}
# As the last version before 0.1.0 wrote a rule: fields that came later are not in it.
OLDER = {
    "name": "older",
    "match": {"task": "*", "tenant": "*", "model": "*"},
    "split": [{**TARGET, "weight": 1}],
    "strategy": "weighted",
    "sticky_by": "request",
    "fallback": [{"backend": "local", "model": "m", "weight": 1}],
    "enabled": True,
}
NEWER = {"name": "newer", "split": [TARGET], "of_a_version_to_come": True}


@pytest.fixture
def write(redis_client, redis_prefix):
    """Stores a set as another version's control plane does."""

    async def written(revision, *documents):
        fields = {"revision": revision, "rules": json.dumps(documents)}
        await redis_client.hset(f"{redis_prefix}{{rules}}", mapping=fields)
        return fields

    return written


async def test_a_set_of_an_older_version_is_read(write, started, redis_server, redis_prefix):
    await write(7, OLDER)
    current = (await started(redis_server.url, redis_prefix)).current()
    assert (current.revision, [one.name for one in current.rules]) == (7, ["older"])


@pytest.mark.usefixtures("eager")
async def test_a_set_of_a_newer_version_changes_nothing_and_is_left_alone(
    write, started, store, redis_server, redis_client, redis_prefix
):
    running = await started(redis_server.url, redis_prefix, "running")
    await store.put(rules("known"), expected_revision=1)
    await until(lambda: running.current().revision == 2)
    written = await write(3, NEWER)
    await until(lambda: running._rules_fault)
    beginning = await started(redis_server.url, redis_prefix, "beginning")
    assert running.current() == RuleSet(revision=2, rules=rules("known"))
    assert beginning.current() == SEED  # the configuration file's
    told = {one.id: (one.state, one.detail) for one in await store.workers()}
    assert {state for state, _ in told.values()} == {"refused"}
    assert all("unknown field 'of_a_version_to_come'" in detail for _, detail in told.values())
    assert await redis_client.hmget(f"{redis_prefix}{{rules}}", list(written)) == [b"3", written["rules"].encode()]


@pytest.mark.usefixtures("eager")
async def test_going_back_to_a_set_that_both_can_read_is_enough(write, started, store, redis_server, redis_prefix):
    worker = await started(redis_server.url, redis_prefix)
    await write(2, NEWER)
    await until(lambda: worker._rules_fault)
    assert await store.put(rules("known"), expected_revision=2) == 3
    assert (await store.applied(3, timeout_s=BOUND_S)).workers == 1
    assert worker.current() == RuleSet(revision=3, rules=rules("known"))
