"""What is written down in a run: requests by their clients, executions by the LLM server, faults by who made them.

Every line of the log is one of these as JSON, under its name. All times are of the machine's one monotonic clock.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

How = Literal["answered", "streamed", "broken", "cut", "refused", "silent"]
"""How a request ended for its client.

- `answered`: a whole answer with its length, whatever its status;
- `streamed`: a stream up to its `[DONE]`;
- `broken`: a stream that ended with an error event, or a whole end without `[DONE]`;
- `cut`: the connection ended before the answer did;
- `refused`: no connection;
- `silent`: nothing until the client lost its patience, long after the request's time was up.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request that a client has begun to send. `number` counts those of one ordering key or sequence."""

    id: str
    kind: str
    at: float
    key: str = ""
    order_key: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How it ended.

    Attributes:
        code: of an error, also of one inside a stream.
        answer: what the answer says, and `expected` what it should.
        ticket: of its order, 0 where it has none.
        execution: the LLM server's own name for the work behind this answer.
        first: the round of the client's event loop that saw the first byte of the answer; `last` that of the last.
    """

    id: str
    at: float
    how: How
    status: int = 0
    code: str = ""
    answer: str = ""
    expected: str = ""
    ticket: int = 0
    execution: str = ""
    tokens: int = 0
    first: int = -1
    last: int = -1

    @property
    def is_success(self) -> bool:
        """Whether the client takes it for the answer that it wanted."""
        return self.how == "streamed" or (self.how == "answered" and 200 <= self.status < 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One request in the LLM server; `ended` is infinite where the server died, or its caller left, before that."""

    id: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault that was made: `began` before anything was done, `healed` after all of it was undone."""

    part: str
    action: str
    began: float
    healed: float

    @property
    def name(self) -> str:
        """As the report calls it."""
        return f"{self.action} {self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit as configured: `amount` come back in `per_s`, `burst` may come at once. `places` has no time."""

    kind: Literal["requests", "tokens", "places"]
    amount: int
    per_s: float = 0.0
    burst: int = 0


LINES: Final[dict[str, type]] = {"sent": Sent, "ended": Ended, "execution": Execution, "struck": Struck}


@dataclass(slots=True)
class History:
    """All of a run. `limits` are by the key that has them."""

    sent: list[Sent] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    limits: dict[str, Limit] = field(default_factory=dict)

    def pairs(self) -> list[tuple[Sent, Ended]]:
        """Each request with its end, for those that have one."""
        ends = {one.id: one for one in self.ended}
        return [(one, ends[one.id]) for one in self.sent if one.id in ends]


def line(one: Any) -> str:
    """Its line in the log."""
    name = next(name for name, kind in LINES.items() if isinstance(one, kind))
    return json.dumps({name: asdict(one)})


def read(lines: Iterable[str], limits: dict[str, Limit]) -> History:
    """A log read back."""
    told = History(limits=limits)
    places: dict[str, list[Any]] = {
        "sent": told.sent,
        "ended": told.ended,
        "execution": told.executions,
        "struck": told.struck,
    }
    for text in lines:
        ((name, values),) = json.loads(text).items()
        places[name].append(LINES[name](**values))
    return told


def executions(path: Path) -> list[Execution]:
    """The LLM server's log: a line when one begins, another when it has ended. The last may be torn by its death."""
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        name, _, at = text.partition(" ")
        what, _, id_ = name.partition(":")
        if at.endswith(";"):
            (began if what == "began" else ended)[id_] = float(at[:-1])
    return [Execution(id=id_, began=at, ended=ended.get(id_, float("inf"))) for id_, at in began.items()]
