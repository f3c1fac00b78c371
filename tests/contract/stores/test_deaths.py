"""Word of a model's death among workers, in a real Redis."""

import pytest

from gateway.core.errors import Fault, FaultKind
from gateway.core.types import Place
from gateway.stores.redis_deaths import RedisDeaths
from gateway.stores.redis_script import connect
from tests.kit.redis_switch import RedisSwitch
from tests.kit.wait import until

pytest_plugins = ["tests.kit.redis"]

PLACE = Place(backend="triton", model="ensemble", replica="a:1")
DEAD = Fault(kind=FaultKind.DEAD, message="Stub process", dead_model="part")


@pytest.fixture
async def three(redis_client, redis_prefix):
    """Three workers, each with what it has heard."""
    workers = [(RedisDeaths(redis_client, redis_prefix), []) for _ in range(3)]
    for deaths, heard in workers:
        deaths.start(lambda place, fault, heard=heard: heard.append((place, fault)))
    channel = f"{redis_prefix}deaths"
    while dict(await redis_client.pubsub_numsub(channel))[channel.encode()] < 3:
        pass
    yield workers
    for deaths, _ in workers:
        await deaths.close()


async def test_all_others_hear_it_and_the_teller_does_not(three):
    (one, own), (_, second), (_, third) = three
    one.tell(PLACE, DEAD)
    await until(lambda: second and third)
    assert own == []
    for ((place, fault),) in (second, third):
        assert place == PLACE
        assert (fault.kind, fault.dead_model) == (FaultKind.DEAD, "part")


async def test_a_message_that_is_none_ends_nothing(three, redis_client, redis_prefix):
    (one, _), (_, second), _ = three
    for strange in ("{", "[1]", "7", "null"):
        await redis_client.publish(f"{redis_prefix}deaths", strange)
    one.tell(PLACE, DEAD)
    await until(lambda: second)
    assert len(second) == 1


async def test_redis_may_come_and_go(redis_server, redis_prefix):
    async with RedisSwitch(redis_server.port) as switch:
        client = connect(switch.url)
        one, other = RedisDeaths(client, redis_prefix), RedisDeaths(client, redis_prefix)
        heard = []
        other.start(lambda place, _: heard.append(place))
        await switch.refuse()
        one.tell(PLACE, DEAD)
        await switch.restore()

        def told():
            one.tell(PLACE, DEAD)
            return heard

        await until(told, timeout_s=10)
        for deaths in (one, other):
            await deaths.close()
        await client.aclose()
