"""Three gateway processes over one Redis keep one limit, to the last request, token and nano-dollar; and nothing stays
taken when requests fail, callers leave, processes are killed and Redis pauses.

Small runs; `python -m tests.bench.admission` makes them large.
"""

from tests.kit.replica_runs import limits_run

pytest_plugins = ["tests.kit.redis"]


async def test_three_processes_admit_exactly_what_the_limits_give(tmp_path, redis_server, redis_client, redis_prefix):
    told = await limits_run(
        tmp_path, redis_server.url, redis_client, redis_prefix, workers=1, count=240, in_flight=24, amount=60
    )
    assert set(told) == {"requests", "tokens", "usd"}
