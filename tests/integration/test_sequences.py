"""Sequences over two real Tritons, a real Redis and a gateway of two workers."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from tritonclient import grpc

from tests.kit.servers import Server, running
from tests.kit.serving import KEY, children, control_plane, serving
from tests.kit.wait import until_async
from tests.parity.client_models import TOTAL

pytest_plugins = ["tests.kit.redis"]

OTHER_KEY = "gw-test-other"
SEQUENCES = 40
CONFIG, MODEL = TOTAL
CONFIG = CONFIG.replace("max_batch_size: 4", "max_batch_size: 64").replace(
    "5000000", "60000000"
)  # room for all, for long


@contextmanager
def mortal(folder) -> Iterator[Server]:
    """A Triton with the model, which may be killed."""
    try:
        with running("triton", folder) as server:
            server.add_model("total", config=CONFIG, model=MODEL)
            with grpc.InferenceServerClient(server.grpc) as asked:
                asked.load_model("total")
            yield server
    except AssertionError as error:
        if "ended with status -9" not in str(error):
            raise


@pytest.fixture
def servers(tmp_path):
    with mortal(tmp_path / "a") as a, mortal(tmp_path / "b") as b:
        yield a, b


@pytest.fixture
async def http(tmp_path, servers, redis_server, redis_prefix):
    sections = {
        "backends": {"triton": {"kind": "triton", "url": ",".join(server.grpc for server in servers)}},
        "tasks": {"tensor": {"contract": "tensor", "timeout_ms": 30_000}},
        "rules": [{"name": "tensors", "match": {"task": "tensor"}, "split": [{"backend": "triton", "model": "*"}]}],
        "redis": {"url": redis_server.url, "prefix": redis_prefix},
        "keys": [
            {"id": "test", "tenant": "test", "key_env": "SERVING_KEY"},
            {"id": "other", "tenant": "other", "key_sha256": hashlib.sha256(OTHER_KEY.encode()).hexdigest()},
        ],
    }
    async with serving(tmp_path, "", "--workers", "2", **sections) as gateway, gateway.http() as http:
        yield http


async def send(http, chosen: object, number: int, *, key: str = KEY, **flags: bool) -> httpx.Response:
    tensor = {"name": "NUMBER", "datatype": "INT32", "shape": [1, 1], "data": [number]}
    parameters = {"sequence_id": chosen, **{f"sequence_{name}": value for name, value in flags.items()}}
    headers = {"authorization": f"Bearer {key}"}
    return await http.post(
        "/v2/models/total/infer", json={"inputs": [tensor], "parameters": parameters}, headers=headers
    )


def total(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["outputs"][0]["data"][0]


async def step(http, ids, number: int, **flags: bool) -> list[httpx.Response]:
    """One request of each sequence, all at once."""
    return await asyncio.gather(*(send(http, chosen, number + index, **flags) for index, chosen in enumerate(ids)))


def kill(server: Server) -> None:
    port = server.grpc.rpartition(":")[2]
    (pid,) = [pid for pid, line in children(os.getpid()).items() if f"--grpc-port={port}" in line.replace(" ", "=")]
    os.kill(pid, signal.SIGKILL)


async def test_each_is_right_and_a_lost_server_ends_its_own_alone(http, servers):
    ids = [index + 1 if index % 2 else f"sequence-{index}" for index in range(SEQUENCES)]
    wanted = [0] * SEQUENCES
    for round_ in range(4):
        answers = await step(http, ids, 100 * round_, start=round_ == 0)
        wanted = [want + 100 * round_ + index for index, want in enumerate(wanted)]
        assert [total(answer) for answer in answers] == wanted
    counts = [await inferences(server) for server in servers]
    assert sum(counts) == 4 * SEQUENCES
    assert min(counts) > 4 * 5  # chance would have to be very one-sided

    kill(servers[0])
    for _ in range(2):
        answers = await step(http, ids, 0)
        lost = [index for index, answer in enumerate(answers) if answer.status_code != 200]
        wanted = [want + index for index, want in enumerate(wanted)]
        assert len(lost) == counts[0] // 4
        for index, answer in enumerate(answers):
            if index in lost:
                assert (answer.status_code, answer.json()) == (410, {"error": LOST})
            else:
                assert total(answer) == wanted[index]

    begun_anew = [ids[index] for index in lost]

    async def all_started() -> bool:
        return all(answer.status_code == 200 for answer in await step(http, begun_anew, 5, start=True))

    await until_async(all_started, timeout_s=10)
    assert [total(answer) for answer in await step(http, begun_anew, 1)] == [6 + 2 * n for n in range(len(lost))]
    ends = await step(http, ids, 0, end=True)
    assert all(answer.status_code == 200 for answer in ends)
    unknown = await send(http, ids[1], 1)
    assert unknown.status_code == 400
    assert unknown.json()["error"] == (
        f"inference request for sequence {ids[1]} to model 'total' must specify the START flag on the first request "
        "of the sequence"
    )


LOST = "the server that kept this sequence is gone, and its state with it: start a new sequence"


async def inferences(server: Server) -> int:
    with grpc.InferenceServerClient(server.grpc) as asked:
        statistics = asked.get_inference_statistics("total")
    return statistics.model_stats[0].inference_count


async def test_equal_ids_of_two_tenants_do_not_meet(http):
    keys = (KEY, OTHER_KEY)
    totals = dict.fromkeys(keys, 0)
    for round_ in range(5):
        for index, key in enumerate(keys):
            number = 10**index
            answer = await send(http, 7, number, key=key, start=round_ == 0, end=round_ == 4)
            totals[key] += number
            assert total(answer) == totals[key]
    assert totals == {KEY: 5, OTHER_KEY: 50}
    assert (await send(http, 7, 1, key=OTHER_KEY)).status_code == 400


async def test_a_replica_is_drained_and_its_sequences_end_cleanly(tmp_path, http, servers):
    """Before its server is stopped: what lives there goes on to its end, and what begins does so elsewhere."""
    old, new = ([f"{name}{n}" for n in range(SEQUENCES // 2)] for name in ("old", "new"))

    async def go_on(ids: list[str], steps: int, **flags: bool) -> None:
        totals = [total(answer) for answer in await step(http, ids, 1, **flags)]
        assert totals == [steps * (1 + index) for index in range(len(ids))]

    await go_on(old, 1, start=True)
    async with control_plane(tmp_path / "serving.yaml") as admin:
        scope = {"replica": servers[0].grpc}
        body = {"action": "drain", "scope": scope, "reason": "it gets a new card", "ttl_s": 600}
        switch = (await admin.post("/switches", json=body)).json()
        assert switch["applied"]["workers"] == switch["applied"]["of"] == 2
        before = [await inferences(server) for server in servers]
        assert min(before) > 0
        await go_on(new, 1, start=True)
        assert await inferences(servers[0]) == before[0]
        await go_on(old, 2)
        await go_on(old, 3, end=True)
        assert await inferences(servers[0]) == 3 * before[0]

        async def is_drained() -> bool:
            return (await admin.get("/switches")).json()["items"][0]["is_drained"] is True

        await until_async(is_drained)
        await go_on(new, 2, end=True)
        assert await inferences(servers[0]) == 3 * before[0]
