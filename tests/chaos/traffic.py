"""The clients: each asks one kind of thing over and over, knows the right answer, and writes down what became of it."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TextIO

from tests.chaos.answers import PROMPT_TOKENS, WORDS, doubled, text_of
from tests.chaos.checker import TIMEOUT_S
from tests.chaos.client import Answer, ask
from tests.chaos.history import Ended, History, How, Sent, line
from tests.kit.replicas import Rounds

PATIENCE_S: Final = TIMEOUT_S + 40.0
"""Much longer than any request may take: who gives up before the gateway cannot tell what it would have said."""
THINK_S: Final = 0.35
STEPS: Final = 5  # of a sequence

CLIENTS: Final = {
    "tensor": 2,
    "v2": 2,
    "chat": 2,
    "stream": 3,
    "serial": 4,
    "release": 4,
    "requests": 2,
    "tokens": 2,
    "concurrent": 4,
    "sequence": 2,
    "admin": 1,
}
"""How many clients of each kind there are; of the ordered kinds half share one ordering key."""


@dataclass(slots=True)
class Made:
    """Keys that clients have made through the control plane and have its word for: id and secret."""

    there: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)


class Traffic:
    """All clients. `ports` are of the data plane through its switch and straight, and of the control plane."""

    def __init__(
        self, front: int, straight: int, admin: int, admin_token: str, history: History, log: TextIO, seed: int
    ) -> None:
        self._front, self._straight, self._admin = front, straight, admin
        self._admin_token = admin_token
        self._history = history
        self._log = log
        self._seed = seed
        self._rounds = Rounds()
        self._numbers = itertools.count(1)
        self.made = Made()
        self.in_flight: set[str] = set()
        self.stopping = asyncio.Event()
        self._asking: dict[str, Callable[[str, random.Random], Awaitable[Ended]]] = {
            "tensor": self._tensor,
            "v2": self._v2,
            "sequence": self._sequence,
            "admin": self._key,
        }

    async def run(self) -> None:
        """Until `stopping` is set: then each client ends what it has begun."""
        async with asyncio.TaskGroup() as clients:
            for kind, count in CLIENTS.items():
                for number in range(count):
                    draw = random.Random(f"{self._seed}/{kind}/{number}")
                    clients.create_task(self._client(kind, f"{kind}-{number % 2}", draw))

    async def _client(self, kind: str, name: str, draw: random.Random) -> None:
        while not self.stopping.is_set():
            await self.one(kind, name, draw)
            pause_s = THINK_S * draw.uniform(0.2, 1.8)
            try:
                async with asyncio.timeout(pause_s):
                    await self.stopping.wait()
            except TimeoutError:
                pass

    async def one(self, kind: str, name: str, draw: random.Random) -> Ended:
        """One request of this kind, or one sequence; its (last) end."""
        asking = self._asking.get(kind)
        return await (asking(name, draw) if asking else self._chat(kind, name))

    # --- one request ---------------------------------------------------------------------------------------

    async def _send(
        self,
        kind: str,
        path: str,
        body: Any,
        judge: Callable[[Answer, Ended], dict[str, Any]],
        **more: Any,
    ) -> Ended:
        sent = Sent(
            id=more.pop("id", "") or self.name(kind),
            kind=kind,
            at=time.monotonic(),
            key="admin" if kind == "admin" else more.get("key", "open"),  # its name: the log holds no secret
            order_key=more.pop("order_key", ""),
            number=more.pop("number", 0),
        )
        self._note(sent)
        self.in_flight.add(sent.id)
        answer = await ask(
            more.pop("port", self._front),
            more.pop("method", "POST"),
            path,
            key=more.pop("key", "open"),
            rounds=self._rounds,
            patience_s=PATIENCE_S,
            body=body,
            headers=more.pop("headers", {}),
        )
        told = Ended(
            id=sent.id,
            at=time.monotonic(),
            how=answer.how,
            status=answer.status,
            first=answer.first,
            last=answer.last,
            ticket=int(answer.headers.get("x-ordering-ticket", 0)),
        )
        ended = _with(told, judge(answer, told))
        self.in_flight.discard(sent.id)
        self._note(ended)
        return ended

    def name(self, kind: str) -> str:
        """A name for the next request."""
        return f"{kind}/{next(self._numbers)}"

    def _note(self, one: Sent | Ended) -> None:
        (self._history.sent if isinstance(one, Sent) else self._history.ended).append(one)
        self._log.write(line(one) + "\n")

    # --- chats ---------------------------------------------------------------------------------------------

    async def _chat(self, kind: str, name: str) -> Ended:
        id_ = self.name(kind)
        is_stream = kind == "stream"
        is_ordered = kind in {"serial", "release"}
        document = {
            "model": kind if is_ordered else "plain",
            "messages": [{"role": "user", "content": id_}],
            "max_tokens": WORDS,
            **({"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}),
        }

        def judge(answer: Answer, told: Ended) -> dict[str, Any]:
            if is_stream and answer.status == 200:
                return {**_stream(answer), "expected": text_of(id_)}
            if told.how != "answered" or answer.status != 200:
                return _error(answer)
            whole = answer.json()
            return {
                "answer": whole["choices"][0]["message"]["content"],
                "expected": text_of(id_),
                "execution": whole["id"],
                "tokens": whole["usage"]["total_tokens"],
            }

        return await self._send(
            kind,
            "/v1/chat/completions",
            document,
            judge,
            id=id_,
            key=kind if kind in {"requests", "tokens", "concurrent"} else "open",
            order_key=name if is_ordered else "",
            headers={"x-ordering-key": name} if is_ordered else {},
            port=self._straight if is_ordered else self._front,
        )

    # --- tensors -------------------------------------------------------------------------------------------

    async def _tensor(self, name: str, draw: random.Random) -> Ended:
        numbers = [draw.randrange(1000) for _ in range(4)]
        inputs = [{"name": "X", "datatype": "INT32", "shape": [1, 4], "data": numbers}]
        document = {"input": {"model": "doubled", "inputs": inputs}}
        return await self._send("tensor", "/v1/tasks/tensor", document, _outputs(doubled(numbers)))

    async def _v2(self, name: str, draw: random.Random) -> Ended:
        numbers = [draw.randrange(1000) for _ in range(4)]
        inputs = [{"name": "X", "datatype": "INT32", "shape": [1, 4], "data": numbers}]
        return await self._send("v2", "/v2/models/doubled/infer", {"inputs": inputs}, _outputs(doubled(numbers)))

    async def _sequence(self, name: str, draw: random.Random) -> Ended:
        """One sequence: the sum of its numbers so far, each time. What fails once is given up."""
        total, own = 0, self.name("sum")
        for step in range(STEPS):
            number = draw.randrange(1000)
            total += number
            flags = {"sequence_id": own, "sequence_start": step == 0, "sequence_end": step == STEPS - 1}
            inputs = [{"name": "NUMBER", "datatype": "INT32", "shape": [1, 1], "data": [number]}]
            ended = await self._send(
                "sequence",
                "/v2/models/total/infer",
                {"inputs": inputs, "parameters": flags},
                _outputs([total]),
                number=step,
            )
            if not ended.is_success:
                break
            await asyncio.sleep(THINK_S * draw.random())
        return ended

    # --- the control plane ---------------------------------------------------------------------------------

    async def _key(self, name: str, draw: random.Random) -> Ended:
        """A key is made, or one that was made is deleted."""
        if len(self.made.there) > 10 or (self.made.there and draw.random() < 0.3):
            id_ = draw.choice(sorted(self.made.there))
            secret = self.made.there.pop(id_)  # whatever comes: without an answer nobody knows
            ended = await self._send("admin", f"/admin/v1/keys/{id_}", None, _status, method="DELETE", **self._to_admin)
            if ended.is_success:
                self.made.gone[id_] = secret
            return ended

        def judge(answer: Answer, told: Ended) -> dict[str, Any]:
            if told.how == "answered" and answer.status == 201:
                made = answer.json()
                self.made.there[made["id"]] = made["key"]
            return _status(answer, told)

        document = {"tenant": "made", "name": self.name("key"), "limits": []}
        return await self._send("admin", "/admin/v1/keys", document, judge, **self._to_admin)

    @property
    def _to_admin(self) -> dict[str, Any]:
        return {"port": self._admin, "key": self._admin_token}

    async def key_works(self, secret: str) -> str:
        """What the data plane says to one who comes with it: `ok` or a code."""
        answer = await ask(self._straight, "GET", "/v1/models", key=secret, rounds=self._rounds, patience_s=PATIENCE_S)
        return "ok" if answer.status == 200 else str(_error(answer).get("code") or answer.how)


def _with(told: Ended, more: dict[str, Any]) -> Ended:
    return replace(told, **more)


def _status(answer: Answer, told: Ended) -> dict[str, Any]:
    """A success by its status alone."""
    return {} if told.is_success else _error(answer)


def _outputs(expected: list[int]) -> Callable[[Answer, Ended], dict[str, Any]]:
    def judge(answer: Answer, told: Ended) -> dict[str, Any]:
        if told.how != "answered" or answer.status != 200:
            return _error(answer)
        whole = answer.json()
        (output,) = whole.get("output", whole)["outputs"]
        return {"answer": json.dumps(output["data"]), "expected": json.dumps(expected)}

    return judge


def _stream(answer: Answer) -> dict[str, Any]:
    """What a stream has said, and how it ended."""
    events = answer.events()
    documents = [json.loads(one) for one in events if one != "[DONE]"]
    errors = [one["error"]["code"] for one in documents if "error" in one]
    parts = [one["choices"][0]["delta"].get("content", "") for one in documents if one.get("choices")]
    is_whole = answer.how == "answered"
    how: How = "streamed" if is_whole and events[-1:] == ["[DONE]"] and not errors else "broken" if is_whole else "cut"
    usage = next((one["usage"] for one in documents if one.get("usage")), {})
    return {
        "how": how,
        "code": errors[0] if errors else "",
        "answer": "".join(parts),
        "execution": next((one["id"] for one in documents if "id" in one), ""),
        "tokens": usage.get("total_tokens", PROMPT_TOKENS),
    }


def _error(answer: Answer) -> dict[str, Any]:
    """The code of an error, in whichever form the path has; `/v2` has a text alone, whose status stands for it."""
    if answer.how != "answered":
        return {}
    document = answer.json()
    error = document.get("error", document)
    if isinstance(error, dict):
        return {"code": error.get("code", "")}
    is_of_store = answer.status == 503 and "store" in error
    return {"code": "sequences_unavailable" if is_of_store else _CODES.get(answer.status, "")}


_CODES: Final = {
    400: "sequence_unknown",
    410: "sequence_lost",
    429: "queue_full",
    502: "backend_error",
    503: "no_healthy_backend",
    504: "deadline_exceeded",
}
