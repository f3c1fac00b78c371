"""The control plane as commands reach it, and the one way in which they end."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import httpx
import typer

from gateway.cli.terminal import say
from gateway.cli.trust import system_trust
from gateway.settings import ConfigError
from gateway.settings.secrets import from_environment

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
STACK_FILE = Path(".run/stack.json")  # where `gateway up` says what it started
TIMEOUT_S = 10.0
TOKEN_ENV = "GATEWAY_ADMIN_TOKEN"  # noqa: S105 - the variable's name, not a secret
PAGE = 500  # the most that the control plane gives at once

AdminUrl = Annotated[
    str,
    typer.Option(envvar="GATEWAY_ADMIN_URL", help="Control plane; default: as `gateway up` left it."),
]
AdminToken = Annotated[
    str,
    typer.Option(envvar=TOKEN_ENV, help="Admin key or OIDC token; default: as `gateway up` left it."),
]
Reason = Annotated[str, typer.Option("--reason", metavar="WORDS", help="Why; kept in the audit log.")]
Json = Annotated[bool, typer.Option("--json", help="Print the control plane's answer as JSON.")]


class Failure(typer.Exit):
    """End with one clear line on stderr."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(code)
        say(line, err=True)


class Refusal(Exception):
    """A call that came to nothing.

    Attributes:
        line: why, for people.
        exit_code: with which a command ends for it.
        document: the control plane's problem document; empty where none came.
    """

    def __init__(self, line: str, exit_code: int, document: Mapping[str, Any] | None = None) -> None:
        super().__init__(line)
        self.line, self.exit_code, self.document = line, exit_code, document or {}


@dataclass(frozen=True, slots=True)
class Admin:
    """The control plane: one call, and its answer or the end of the command."""

    url: str
    token: str = field(repr=False)

    def call(self, method: str, path: str, **asked: Any) -> dict[str, Any]:
        """As `ask`, but every other end than an answer is the command's."""
        try:
            return self.ask(method, path, **asked)
        except Refusal as refusal:
            raise Failure(refusal.line, refusal.exit_code) from refusal

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        revision: int | None = None,
        reason: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        """The answer's JSON object; empty where nothing is left to say. Raises `Refusal`.

        `revision` is the one that a change was made from, `reason` why it is made.
        """
        headers = self._headers(reason)
        if revision is not None:
            headers["if-match"] = str(revision)
        with self._reached():
            answer = httpx.request(
                method,
                self._address(path),
                headers=headers,
                json=body,
                timeout=timeout_s,
                verify=system_trust(),
                trust_env=False,  # a proxy for the web does not lead to the control plane
            )
        if answer.status_code == HTTPStatus.NO_CONTENT:
            return {}
        _judge(answer)
        document = _object(answer)
        if document is None:
            raise Refusal(_refusal(answer, None), EXIT_REFUSED)
        return document

    def items(self, path: str, limit: int, **filters: Any) -> list[dict[str, Any]]:
        """At most `limit` items of a list, page by page; filters that are empty are none."""
        found: list[dict[str, Any]] = []
        cursor: str | None = ""
        while cursor is not None and len(found) < limit:
            asked = query(limit=min(PAGE, limit - len(found)), cursor=cursor, **filters)
            page = self.call("GET", f"{path}{asked}")
            found += page["items"]
            cursor = page["next"]
        return found[:limit]

    def lines(self, path: str) -> Iterator[str]:
        """The lines of an answer that is no JSON object, as they come. Raises `Failure`."""
        try:
            with (
                self._reached(),
                httpx.stream(
                    "GET",
                    self._address(path),
                    headers=self._headers(""),
                    timeout=TIMEOUT_S,
                    trust_env=False,
                    verify=system_trust(),
                ) as answer,
            ):
                if not answer.is_success:
                    answer.read()
                _judge(answer)
                yield from answer.iter_lines()
        except Refusal as refusal:
            raise Failure(refusal.line, refusal.exit_code) from refusal

    def _address(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/admin/v1{path}"

    def _headers(self, reason: str) -> httpx.Headers:
        # UTF-8: people give reasons in their own language.
        headers = httpx.Headers({"authorization": f"Bearer {self.token}"}, encoding="utf-8")
        if words := " ".join(reason.split()):  # a header is one line
            headers["x-change-reason"] = words
        return headers

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise Refusal(f"not an address: {self.url}", EXIT_USAGE) from error
        except httpx.HTTPError as error:
            raise Refusal(f"no control plane answers at {self.url}", EXIT_UNREACHABLE) from error


def query(**asked: Any) -> str:
    """The query of a path; what is None or empty is not asked."""
    said = {name: value for name, value in asked.items() if value not in (None, "")}
    return f"?{urlencode(said)}" if said else ""


def part(name: object) -> str:
    """A name as one part of a path."""
    return quote(str(name), safe="")


def admin_of(url: str, token: str) -> Admin:
    """From the options or the environment, else from the stack that runs in this folder.

    The stack's token goes to no other address than the stack's.
    """
    try:
        token = token or from_environment(TOKEN_ENV)  # what is in a file: the variable itself is the option's
    except ConfigError as error:
        raise Failure(str(error), EXIT_USAGE) from error
    stack = {} if url and token else stack_told()
    of_stack = str(stack.get("admin_url", ""))
    url = url or of_stack
    if not token and url == of_stack:
        token = str(stack.get("admin_token", ""))
    if not url:
        raise Failure(
            f"no control plane: run `gateway up` (there is no {STACK_FILE} here), or give --admin-url or "
            "GATEWAY_ADMIN_URL, as for a stack of another --run-dir",
            EXIT_USAGE,
        )
    if not token:
        raise Failure("no admin token: give --admin-token or set GATEWAY_ADMIN_TOKEN", EXIT_USAGE)
    if not token.isascii() or not token.isprintable():
        raise Failure("the admin token is not one: it has other characters than a token may have", EXIT_USAGE)
    return Admin(url, token)


def stack_told() -> Mapping[str, Any]:
    """What `gateway up` says in this folder of the stack that it started; empty where there is none."""
    try:
        stack = json.loads(STACK_FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stack if isinstance(stack, dict) else {}


def _object(answer: httpx.Response) -> dict[str, Any] | None:
    try:
        document = answer.json()
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _judge(answer: httpx.Response) -> None:
    """Raise `Refusal` for any answer but a good one."""
    if not answer.is_success:
        document = _object(answer)
        raise Refusal(_refusal(answer, document), EXIT_REFUSED, document)


def _refusal(answer: httpx.Response, document: Mapping[str, Any] | None) -> str:
    if document is None or "detail" not in document:
        return f"refused: HTTP {answer.status_code}, not an answer of a control plane"
    again = answer.headers.get("retry-after", "") if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS else ""
    detail = str(document["detail"]).removeprefix("#/")  # a JSON pointer; people read the path
    return f"refused: {detail}" + (f"; again in {again} s" if again else "")
