"""Plays recorded cases against a server and tells what it saw.

Every case has a model of its own, so many are played at the same time: what takes time in them is sleep. The requests
of a case go out by gRPC; in a second run those that are to be refused go by HTTP, for the status and the text there.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import httpx
import numpy as np
from tritonclient import grpc as client
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from tests.kit.servers import Server

GIVE_UP_S = 30
TICK_S = 0.004
LEAD_S = 0.02
CONTROLS = slice(8, 12)

Case = Mapping[str, Any]
Request = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One request's end. `status` is OK, a gRPC code or an HTTP status; `info` is the probe's word on how it ran."""

    status: str
    text: str = ""
    info: tuple[int, ...] = ()
    sent_s: float
    ended_s: float

    @property
    def latency_ms(self) -> float:
        return (self.ended_s - self.sent_s) * 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One execution, in the recording's words; `ids` in batch order."""

    ids: tuple[int, ...]
    rows: int
    null_slots: int
    extra: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Play:
    """What came of one run: an answer for each request id, and how late the client itself was at worst."""

    answers: Mapping[int, Answer]
    late_ms: float

    @property
    def batches(self) -> list[Batch]:
        """What was executed, in the order of the starts."""
        members: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        facts: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        for number, answer in self.answers.items():
            if answer.status == "OK":
                execution, requests, rows, place, instance, _, nulls, start_us = answer.info[:8]
                members[start_us, instance, execution].append((place, number))
                facts[start_us, instance, execution] = (requests, rows, nulls)
        return [
            Batch(
                ids=tuple(number for _, number in sorted(members[key])),
                rows=facts[key][1],
                null_slots=facts[key][2],
                extra=facts[key][0] - len(members[key]),
            )
            for key in sorted(members)
        ]


class Player:
    """Clients of one server, and a clock that watches how late this process itself runs."""

    def __init__(self, grpc: aio.InferenceServerClient, http: httpx.AsyncClient) -> None:
        self.grpc = grpc
        self.http = http
        self._ticks: list[tuple[float, float]] = []

    async def play(self, case: Case, *, by_http: Collection[int] = ()) -> Play:
        """Send the case's requests when their time has come; returns when all have ended."""
        start_s = time.monotonic() + LEAD_S

        async def send(request: Request) -> Answer:
            await asyncio.sleep(start_s + request["at_ms"] / 1000 - time.monotonic())
            return await (self._by_http if request["id"] in by_http else self._by_grpc)(case, request)

        answers = await asyncio.gather(*(send(request) for request in case["requests"]))
        sends = zip(case["requests"], answers, strict=True)
        late = [(answer.sent_s - start_s) * 1000 - request["at_ms"] for request, answer in sends]
        late += [late_s * 1000 for at_s, late_s in self._ticks if at_s >= start_s]
        numbered = {request["id"]: answer for request, answer in zip(case["requests"], answers, strict=True)}
        return Play(answers=numbered, late_ms=max(late))

    async def warm_up(self, case: Case) -> None:
        """Let every instance run once: the first execution of each is up to 50 ms slower than the rest."""
        first: list[asyncio.Task[Answer]] = []
        for number in range(case["config_pbtxt"].count("count: 2") + 1):
            wish = {"id": 0, "sleep_ms": 60, "rows": 1, "sequence_id": 9000 + number, "start": True, "end": True}
            first.append(asyncio.create_task(self._by_grpc(case, wish)))
            await asyncio.sleep(0.03)
        await asyncio.gather(*first)

    async def watch(self) -> None:
        """Tick for ever, noting the lateness of each tick."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._ticks.append((now, now - due))

    async def _by_grpc(self, case: Case, request: Request) -> Answer:
        sent_s = time.monotonic()
        call = asyncio.ensure_future(self.grpc.infer(**_grpc_arguments(case, request)))
        if "cancel_after_ms" in request:
            asyncio.get_running_loop().call_later(request["cancel_after_ms"] / 1000, call.cancel)
        status, text, info = "OK", "", ()
        try:
            info = tuple((await call).as_numpy("INFO")[0].tolist())
        except asyncio.CancelledError:
            if "cancel_after_ms" not in request:
                raise
            status = "CANCELLED_BY_CLIENT"
        except InferenceServerException as error:
            status, text = error.status().removeprefix("StatusCode."), error.message()
        return Answer(status=status, text=text, info=info, sent_s=sent_s, ended_s=time.monotonic())

    async def _by_http(self, case: Case, request: Request) -> Answer:
        path = f"/v2/models/{request.get('model', case['model'])}"
        if "version" in request:
            path += f"/versions/{request['version']}"
        sent_s = time.monotonic()
        reply = await self.http.post(f"{path}/infer", json=_http_body(request))
        answer = reply.json()
        info = tuple(answer["outputs"][0]["data"][:12]) if reply.status_code == httpx.codes.OK else ()
        return Answer(
            status="OK" if info else str(reply.status_code),
            text=answer.get("error", ""),
            info=info,
            sent_s=sent_s,
            ended_s=time.monotonic(),
        )


@contextlib.asynccontextmanager
async def player(server: Server) -> AsyncIterator[Player]:
    """A player for `server`, watching its own lateness while the block runs."""
    async with (
        aio.InferenceServerClient(server.grpc) as grpc,
        httpx.AsyncClient(base_url=f"http://{server.http}", timeout=GIVE_UP_S, trust_env=False) as http,
    ):
        made = Player(grpc, http)
        watch = asyncio.create_task(made.watch())
        try:
            yield made
        finally:
            watch.cancel()


def _tensors(request: Request) -> list[tuple[str, np.ndarray]]:
    """The inputs by name; a wrong data type is one of numpy's own names for it here."""
    numbers = np.zeros((request["rows"], request.get("width", 2)), request.get("dtype", "INT32").lower())
    numbers[:, 0] = request["id"]
    numbers[:, 1] = request["sleep_ms"]
    tensors = [] if request.get("no_x") else [("X", numbers)]
    if "opt" in request:
        tensors.append(("OPT", np.full((request["rows"], 1), request["opt"], np.int32)))
    return tensors


def _datatype(array: np.ndarray) -> str:
    return array.dtype.name.upper()


def _grpc_arguments(case: Case, request: Request) -> dict[str, Any]:
    inputs = []
    for name, array in _tensors(request):
        inputs.append(client.InferInput(name, list(array.shape), _datatype(array)))
        inputs[-1].set_data_from_numpy(array)
    return {
        "model_name": request.get("model", case["model"]),
        "model_version": str(request.get("version", "")),
        "inputs": inputs,
        "outputs": [client.InferRequestedOutput(request["output"])] if "output" in request else None,
        "sequence_id": request.get("sequence_id", 0),
        "sequence_start": request.get("start", False),
        "sequence_end": request.get("end", False),
        "priority": request.get("priority", 0),
        "timeout": request.get("timeout_us"),
        "client_timeout": request.get("client_timeout_ms", GIVE_UP_S * 1000) / 1000,
    }


def _http_body(request: Request) -> dict[str, Any]:
    names = {
        "sequence_id": "sequence_id",
        "start": "sequence_start",
        "end": "sequence_end",
        "priority": "priority",
        "timeout_us": "timeout",
    }
    body: dict[str, Any] = {
        "parameters": {name: request[key] for key, name in names.items() if key in request},
        "inputs": [
            {"name": name, "shape": list(array.shape), "datatype": _datatype(array), "data": array.ravel().tolist()}
            for name, array in _tensors(request)
        ],
    }
    if "output" in request:
        body["outputs"] = [{"name": request["output"]}]
    return body
