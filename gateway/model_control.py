"""One call to every server of a backend: what changes models has to reach them all."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from gateway.core.errors import BackendError, Fault
from gateway.ports import ModelServer

_Answer = TypeVar("_Answer")


async def ask_every_replica(
    server: ModelServer, call: Callable[[str], Awaitable[_Answer]]
) -> Mapping[str, _Answer | Fault]:
    """Each replica's answer to `call`, which is given its name; a failure of one stops no other.

    A server without replicas has one of the empty name.
    """

    async def asked(replica: str) -> _Answer | Fault:
        try:
            return await call(replica)
        except BackendError as failed:
            return failed.fault

    replicas = tuple(server.replicas()) or ("",)
    return dict(zip(replicas, await asyncio.gather(*map(asked, replicas)), strict=True))


async def on_every_replica(server: ModelServer, call: Callable[[str], Awaitable[object]]) -> Mapping[str, Fault | None]:
    """The same for a call that answers nothing: why it failed there, None where it did not."""
    answers = await ask_every_replica(server, call)
    return {replica: answer if isinstance(answer, Fault) else None for replica, answer in answers.items()}
