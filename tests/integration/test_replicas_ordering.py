"""Requests with one ordering key over three gateway processes: executed, or answered, in the order of their tickets.

Meanwhile callers leave and a process is killed. A small run; `python -m tests.bench.admission` makes it large.
"""

import pytest

from tests.kit.replica_order import order_run

pytest_plugins = ["tests.kit.redis"]
pytestmark = pytest.mark.alone


async def test_order_under_fire(tmp_path, redis_server, redis_client, redis_prefix):
    told = await order_run(tmp_path, redis_server.url, redis_client, redis_prefix, workers=1, names=10, each=30)
    print(told)
