"""The control plane as commands reach it, and the one way in which they end."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
STACK_FILE = Path(".run/stack.json")  # where `gateway up` says what it started
TIMEOUT_S = 10.0

AdminUrl = Annotated[
    str,
    typer.Option(envvar="GATEWAY_ADMIN_URL", help="Control plane; default: as `gateway up` left it."),
]
AdminToken = Annotated[
    str,
    typer.Option(envvar="GATEWAY_ADMIN_TOKEN", help="Admin token; default: as `gateway up` left it."),
]


class Failure(typer.Exit):
    """End with one clear line on stderr."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(code)
        typer.echo(line, err=True)


@dataclass(frozen=True, slots=True)
class Admin:
    """The control plane: one call, and its answer or the end of the command."""

    url: str
    token: str

    def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        revision: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> dict[str, Any]:
        """The answer's JSON object; empty where nothing is left to say. Raises `Failure` for every other end."""
        headers = {"authorization": f"Bearer {self.token}"}
        if revision is not None:
            headers["if-match"] = str(revision)
        try:
            answer = httpx.request(
                method,
                f"{self.url.rstrip('/')}/admin/v1{path}",
                headers=headers,
                json=body,
                timeout=timeout_s,
                trust_env=False,  # a proxy for the web does not lead to the control plane
            )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise Failure(f"not an address: {self.url}", EXIT_USAGE) from error
        except httpx.HTTPError as error:
            raise Failure(f"no control plane answers at {self.url}", EXIT_UNREACHABLE) from error
        if answer.status_code == HTTPStatus.NO_CONTENT:
            return {}
        document = _object(answer)
        if answer.is_success and document is not None:
            return document
        raise Failure(_refusal(answer, document), EXIT_REFUSED)


def admin_of(url: str, token: str) -> Admin:
    """From the options or the environment, else from the stack that runs in this folder."""
    if not (url and token):
        stack = _stack()
        url, token = url or str(stack.get("admin_url", "")), token or str(stack.get("admin_token", ""))
    if not url:
        raise Failure(
            f"no control plane: run `gateway up` (there is no {STACK_FILE} here), or give --admin-url or "
            "GATEWAY_ADMIN_URL, as for a stack of another --run-dir",
            EXIT_USAGE,
        )
    if not token:
        raise Failure("no admin token: give --admin-token or set GATEWAY_ADMIN_TOKEN", EXIT_USAGE)
    return Admin(url, token)


def _stack() -> Mapping[str, Any]:
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


def _refusal(answer: httpx.Response, document: Mapping[str, Any] | None) -> str:
    if document is None or "detail" not in document:
        return f"refused: HTTP {answer.status_code}, not an answer of a control plane"
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        return "refused: the admin token is not the control plane's"
    return f"refused: {document['detail']}"
