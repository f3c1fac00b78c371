"""A Redis Cluster behind the methods that the stores use of `redis.asyncio.Redis`: one such client for each node.

The library has a cluster client of its own. This one differs where a node fails: a call that its caller has ended
because a node hangs makes it look for the node's successor (the library waits for an error, which a hung node never
gives); a pipeline's part for a dead node fails alone, and is not sent again together with the parts that were done; it
never sleeps for a quarter of a second inside the caller's bound; and it needs no permission for COMMAND.

Which node has which slot is read from any node, in the background, and at most every `PAUSE_S`, whatever goes wrong.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline, PubSub
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError

ASK_S: Final = 0.3
PAUSE_S: Final = 0.25
MAX_REDIRECTS: Final = 5
TRY_AGAIN_S: Final = 0.02
NOT_SO: Final = (TypeError, ValueError, LookupError, AttributeError)
"""What reading an answer raises that is not of its form: of something else than Redis, or of one gone mad."""

_Address = tuple[str, int]
_Command = tuple[tuple[Any, ...], Mapping[str, Any]]


class ClusterClient(Redis):
    """A client for the whole cluster. A command goes to the node of its first key, or anywhere if it has none.

    A script's keys must lie in one slot. There are no transactions, and no commands over all nodes.
    """

    def __init__(self, seeds: Sequence[_Address], make: Callable[[str, int], Redis]) -> None:
        self._seeds = tuple(seeds)
        self._make = make
        self._nodes: dict[_Address, Redis] = {}
        self._known: tuple[_Address, ...] = self._seeds  # who may be asked for the slots
        self._slots: dict[int, _Address] = {}
        self._reading: asyncio.Task[None] | None = None
        self._not_before_s = 0.0
        super().__init__(connection_pool=self._node(self._seeds[0]).connection_pool)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """One command, redirected where its slot has moved."""
        address = await self._address(args)
        is_asking = False
        for _ in range(MAX_REDIRECTS):
            node = self._node(address)
            try:
                if is_asking:
                    return await _ask(node, args, options)
                return await node.execute_command(*args, **options)  # type: ignore[no-untyped-call]  # the library's
            except MovedError as error:
                address, is_asking = self._moved(error, address), False
            except AskError as error:
                address, is_asking = (error.host or address[0], error.port), True
            except TryAgainError:  # a slot on its way to another node: some of the keys are there already
                await asyncio.sleep(TRY_AGAIN_S)
            except (ClusterDownError, RedisConnectionError, OSError, asyncio.CancelledError):
                self._look()
                raise
        raise RedisConnectionError("redirected too often")

    def pipeline(self, transaction: bool = False, shard_hint: str | None = None) -> Pipeline:  # noqa: FBT001, FBT002 - the library's signature
        """Commands for any nodes, each node's in one round trip, all at once."""
        if transaction or shard_hint:
            raise ValueError("a cluster has no transactions here")
        return _Pipeline(self)

    def pubsub(self, **options: Any) -> PubSub:
        """On any node: a cluster carries what is published to all of them."""
        return self._node(random.choice(self._known)).pubsub(**options)  # noqa: S311 - to spread, no secret

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: ARG002, FBT001 - the library's signature
        """Close the connections to all nodes."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        nodes, self._nodes = self._nodes, {}
        await asyncio.gather(*(node.aclose() for node in nodes.values()), return_exceptions=True)

    async def run(self, commands: Sequence[_Command], redirects: int = MAX_REDIRECTS) -> list[Any]:
        """Each command's answer, or the error that it ended with, in order."""
        answers: list[Any] = [None] * len(commands)
        parts: dict[_Address, list[int]] = {}
        for i, (args, _) in enumerate(commands):
            try:
                parts.setdefault(await self._address(args), []).append(i)
            except RedisError as error:
                answers[i] = error
        if len(parts) == 1:
            await self._run_part(*parts.popitem(), commands, answers)
        else:
            await asyncio.gather(*(self._run_part(*part, commands, answers) for part in parts.items()))
        moved = [i for i, answer in enumerate(answers) if isinstance(answer, MovedError | TryAgainError)]
        if moved and redirects:
            if any(isinstance(answers[i], TryAgainError) for i in moved):
                await asyncio.sleep(TRY_AGAIN_S)
            again = await self.run([commands[i] for i in moved], redirects - 1)
            for i, answer in zip(moved, again, strict=True):
                answers[i] = answer
        return answers

    async def _run_part(
        self, address: _Address, places: Sequence[int], commands: Sequence[_Command], answers: list[Any]
    ) -> None:
        """What goes to one node. Its errors become answers."""
        pipeline = self._node(address).pipeline(transaction=False)
        for i in places:
            args, options = commands[i]
            pipeline.execute_command(*args, **options)
        try:
            found = await pipeline.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            self._look()
            found = [error] * len(places)
        except asyncio.CancelledError:
            self._look()
            raise
        for i, answer in zip(places, found, strict=True):
            answers[i] = answer
            if isinstance(answer, MovedError):
                self._moved(answer, address)
            elif isinstance(answer, AskError):
                answers[i] = await self._alone(commands[i])
            elif isinstance(answer, ClusterDownError):
                self._look()

    async def _alone(self, command: _Command) -> Any:
        args, options = command
        try:
            return await self.execute_command(*args, **options)
        except (RedisError, OSError) as error:
            return error

    async def _address(self, args: Sequence[Any]) -> _Address:
        """Where a command goes. Waits for the first word of the slots; raises where no node tells them."""
        if not self._slots:
            self._look()
            if self._reading is not None:
                await asyncio.shield(self._reading)
        key = _key(args)
        slot = random.choice(tuple(self._slots)) if key is None and self._slots else key_slot(key or b"")  # noqa: S311 - to spread, no secret
        if slot not in self._slots:
            self._look()
            raise RedisConnectionError("no node of the cluster is known to have this slot")
        return self._slots[slot]

    def _node(self, address: _Address) -> Redis:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._make(*address)
        return node

    def _moved(self, error: MovedError, asked: _Address) -> _Address:
        """Believe it at once, and read the rest of the slots soon."""
        address = (error.host or asked[0], error.port)
        self._slots[error.slot_id] = address
        self._look()
        return address

    def _look(self) -> None:
        """Read the slots anew, unless that is under way or was done just now."""
        if self._reading is None and asyncio.get_running_loop().time() >= self._not_before_s:
            self._reading = asyncio.create_task(self._read(), name="redis-cluster-slots")

    async def _read(self) -> None:
        """Ask one node after the other, in any order, until one tells."""
        try:
            asked = [*dict.fromkeys((*self._known, *self._seeds))]
            random.shuffle(asked)
            for address in asked:
                try:
                    async with asyncio.timeout(ASK_S):
                        told = await self._node(address).execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]  # the library's
                    slots, known = _masters(told, address), _all(told, address)
                except (RedisError, OSError, *NOT_SO):
                    continue
                if slots:
                    await self._take(slots, known)
                    return
        finally:
            self._reading = None
            self._not_before_s = asyncio.get_running_loop().time() + PAUSE_S

    async def _take(self, slots: dict[int, _Address], known: tuple[_Address, ...]) -> None:
        """Put the slots in force, and let go of nodes that have left the cluster."""
        self._slots, self._known = slots, known
        left = [address for address in self._nodes if address not in known and address not in self._seeds]
        gone = [self._nodes.pop(address) for address in left]
        await asyncio.gather(*(node.aclose() for node in gone), return_exceptions=True)


class _Pipeline(Pipeline):
    """Gathers commands as the library's does; the cluster's client sends them."""

    def __init__(self, cluster: ClusterClient) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, transaction=False, shard_hint=None)
        self._cluster = cluster

    async def execute(self, raise_on_error: bool = True) -> list[Any]:  # noqa: FBT001, FBT002 - the library's signature
        commands, self.command_stack = self.command_stack, []
        answers = await self._cluster.run(commands)
        for answer in answers:
            if raise_on_error and isinstance(answer, Exception):
                raise answer
        return answers


async def _ask(node: Redis, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """One command for a slot that the node is still being given."""
    pipeline = node.pipeline(transaction=False)
    pipeline.execute_command("ASKING")
    pipeline.execute_command(*args, **options)
    _, answer = await pipeline.execute(raise_on_error=False)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _key(args: Sequence[Any]) -> bytes | None:
    """The key by which a command finds its node; a channel counts as one."""
    at = 1
    if args[0] in ("EVAL", "EVALSHA"):
        at = 3 if int(args[2]) else len(args)
    key = args[at] if at < len(args) else None
    return key.encode() if isinstance(key, str) else key


def _masters(told: Sequence[Any], asked: _Address) -> dict[int, _Address]:
    """CLUSTER SLOTS by slot. Raises one of `NOT_SO` for what is none."""
    slots: dict[int, _Address] = {}
    for first, last, master, *_ in told:
        if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
            raise ValueError("there are no such slots")
        address = _named(master, asked)  # one tuple for the whole range
        slots.update((slot, address) for slot in range(first, last + 1))
    return slots


def _all(told: Sequence[Any], asked: _Address) -> tuple[_Address, ...]:
    """Every master and replica in CLUSTER SLOTS."""
    return tuple({_named(node, asked): None for _, _, *nodes in told for node in nodes})


def _named(node: Sequence[Any], asked: _Address) -> _Address:
    """A node's address; one that does not know its own host is where we asked (Redis 7: null or `?`)."""
    host = node[0].decode() if isinstance(node[0], bytes) else node[0]
    return (asked[0] if host in (None, "", "?") else host, int(node[1]))
