"""How one request of a load ended, and who can be asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.tuning.report import OK

CONNECTION_REFUSED: Final = "connection_refused"
CONNECTION_FAILED: Final = "connection_failed"
CONNECT_TIMEOUT: Final = "connect_timeout"
CONNECTION_CLOSED: Final = "connection_closed"
TRUNCATED: Final = "truncated"
NOT_HTTP: Final = "not_http"
TOO_LARGE: Final = "too_large"
WRONG_ANSWER: Final = "wrong_answer"

NEVER_REACHED: Final = frozenset({CONNECTION_REFUSED, CONNECTION_FAILED, CONNECT_TIMEOUT})

WORDS: Final = {
    CONNECTION_REFUSED: "nobody listens there",
    CONNECTION_FAILED: "no connection for another reason: no such name, no route, no more of them",
    CONNECT_TIMEOUT: "no connection within 5 s",
    CONNECTION_CLOSED: "the connection ended before any of the answer came",
    TRUNCATED: "it ended in the middle of the answer; of a stream also: it ended without `[DONE]`",
    NOT_HTTP: "what came is not HTTP",
    TOO_LARGE: "more came than 256 KiB of a head, 64 MiB of an answer, or 1 GiB of all that were under way",
    WRONG_ANSWER: "the status is good, the answer is not one",
}
"""The codes that are ours, for readers. Beside them: an error code of the gateway, `http_STATUS`, `grpc_CODE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one request. Instants are those of `time.monotonic`.

    Attributes:
        code: `ok`, or why there is no right answer.
        ended_at: when its last byte came; 0: when `send` returned.
        first_token_at / gaps_ms / tokens: of a stream: its first token (0: none came), the gaps after it, all tokens.
        retry_after_s: after how long the server would be asked again.
        is_repeated: the answer was made for an earlier request.
    """

    code: str = OK
    ended_at: float = 0.0
    first_token_at: float = 0.0
    gaps_ms: Sequence[float] = ()
    tokens: int = 0
    retry_after_s: float = 0.0
    is_repeated: bool = False


class Target(Protocol):
    """Who is asked. One target serves one class of traffic: the request is the target's own."""

    async def send(self, due: float, /) -> Outcome:
        """One request, that was due at that instant of `time.monotonic`, to its end. Raises nothing."""
        ...
