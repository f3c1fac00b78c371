"""The clients of a cluster and of sentinels, where what answers is no such thing, or has gone mad."""

import pytest
from redis.exceptions import TryAgainError

from gateway.stores.redis_script import UNREACHABLE, connect
from tests.kit.redis_said import OK, said

NO_SLOTS = [
    OK,
    b":5\r\n",
    b"*0\r\n",
    b"*1\r\n:1\r\n",
    b"*1\r\n*2\r\n:0\r\n:5\r\n",
    b"*1\r\n*3\r\n:0\r\n:5\r\n$1\r\nx\r\n",
    b"*1\r\n*3\r\n$1\r\na\r\n:5\r\n*2\r\n$1\r\nh\r\n:1\r\n",
    b"*1\r\n*3\r\n:0\r\n:1000000000000\r\n*2\r\n$1\r\nh\r\n:1\r\n",
    b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\n\xff\r\n:1\r\n",
    b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$1\r\nh\r\n$1\r\nz\r\n",
]
NO_MASTER = [
    OK,
    b":5\r\n",
    b"*0\r\n",
    b"*1\r\n:1\r\n",
    b"*2\r\n$1\r\nh\r\n$1\r\nz\r\n",
    b"*2\r\n$1\r\n\xff\r\n$1\r\n1\r\n",
    b"*2\r\n*0\r\n*0\r\n",
]


@pytest.mark.parametrize("told", NO_SLOTS)
async def test_a_node_that_tells_no_slots_is_passed_over(told):
    async with (
        said(lambda _: told) as mad,
        said(lambda words: sane.all_slots() if words[0] == b"CLUSTER" else OK) as sane,
    ):
        alone = connect(f"redis+cluster://127.0.0.1:{mad.port}")
        with pytest.raises(UNREACHABLE):
            await alone.get("a")
        await alone.aclose()
        for _ in range(5):  # they are asked in any order
            both = connect(f"redis+cluster://127.0.0.1:{mad.port},127.0.0.1:{sane.port}")
            assert await both.set("a", "x")
            await both.aclose()


@pytest.mark.parametrize("told", NO_MASTER)
async def test_a_sentinel_that_names_no_master_is_passed_over(told):
    async with said(lambda _: told) as mad, said(lambda _: OK) as master:
        port = str(master.port).encode()
        async with said(lambda _: b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%b\r\n" % (len(port), port)) as sane:
            alone = connect(f"redis+sentinel://127.0.0.1:{mad.port}/m/0")
            with pytest.raises(UNREACHABLE):
                await alone.get("a")
            await alone.aclose()
            both = connect(f"redis+sentinel://127.0.0.1:{mad.port},127.0.0.1:{sane.port}/m/0")
            assert await both.set("a", "x")
            await both.aclose()


async def test_commands_that_shall_be_tried_again_are_so_together_and_in_their_order():
    refused = 0

    def answer(words: list[bytes]) -> bytes:
        nonlocal refused
        if words[0] == b"CLUSTER":
            return node.all_slots()
        if refused < 40:
            refused += 1
            return b"-TRYAGAIN Multiple keys request during rehashing of slot\r\n"
        return OK

    async with said(answer) as node:
        client = connect(f"redis+cluster://127.0.0.1:{node.port}")
        pipeline = client.pipeline()
        for n in range(20):
            pipeline.set("a", n)
        assert await pipeline.execute(raise_on_error=False) == [True] * 20
        asked = [int(words[2]) for words in node.heard if words[0] == b"SET"]
        assert asked == [*range(20)] * 3
        await client.aclose()


async def test_what_can_never_be_answered_is_given_up():
    async with said(lambda words: node.all_slots() if words[0] == b"CLUSTER" else b"-TRYAGAIN x\r\n") as node:
        client = connect(f"redis+cluster://127.0.0.1:{node.port}")
        with pytest.raises(UNREACHABLE):
            await client.set("a", "x")
        (answer,) = await client.pipeline().set("a", "x").execute(raise_on_error=False)
        assert isinstance(answer, TryAgainError)
        await client.aclose()
