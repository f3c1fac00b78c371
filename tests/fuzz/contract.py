"""Schemathesis over the whole OpenAPI of both planes: what is declared is answered, and nothing else."""

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.planes import Planes
from tests.fuzz.target import Target

TIMEOUT_S = 20.0
CHECKS = [status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance]
DOCUMENTED_5XX = (501, 502, 503, 504)  # docs/errors.md; 501: what a backend lacks, 502 to 504: what is wrong behind us
EVERYWHERE = {
    "405": "every path: the method is not there",
    "431": "every path: the head is over 64 KiB",
}
"""Answers of the server itself, which no operation declares."""


def operations(planes: Planes) -> Iterator[Target]:
    """A target for each operation and way of making its requests."""
    load_all_checks()
    for plane, url, path, token in (
        ("data", planes.url, "/openapi.json", planes.key),
        ("admin", planes.admin_url, "/admin/v1/openapi.json", planes.admin_token),
    ):
        headers = {"authorization": f"Bearer {token}"}
        document = httpx.get(url + path, headers=headers, trust_env=False, timeout=30).json()
        schema = schemathesis.openapi.from_dict(document)
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path.endswith("/stream") and plane == "data":
                continue  # a WebSocket's handshake, which is attacked as such
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                inputs = _cases(operation, mode)
                if not _is_possible(inputs):
                    continue
                yield Target(
                    name=f"{plane} {operation.method.upper()} {operation.path} {mode.value}",
                    about="declared answers only, and no failure of the gateway's own",
                    inputs=inputs,
                    check=_Check(url, headers),
                )


def _is_possible(inputs: st.SearchStrategy[Any]) -> bool:
    """Whether there is such a request at all: of a path that takes nothing there is no wrong one."""
    found: list[Any] = []

    @settings(
        max_examples=1, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(inputs)
    def one(case: Any) -> None:
        found.append(case)

    with contextlib.suppress(Unsatisfiable):
        one()
    return bool(found)


def _cases(operation: Any, mode: GenerationMode) -> st.SearchStrategy[Any]:
    made: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)
    return made


class _Check:
    """Sends one case and holds its answer against the document."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url = url
        self._headers = headers

    def __call__(self, case: Any) -> None:
        answer = case.call(base_url=self._url, headers=self._headers, timeout=TIMEOUT_S, allow_redirects=False)
        told = f"{case.as_curl_command()}\n{answer.status_code} {answer.content[:600]!r}"
        is_ours = answer.status_code == 500 and not _is_servers_own(answer)
        assert answer.status_code < 500 or answer.status_code in DOCUMENTED_5XX or not is_ours, told
        if str(answer.status_code) in EVERYWHERE or _is_head_refused(answer):
            return
        try:
            case.validate_response(answer, checks=CHECKS)
        except FailureGroup as error:
            raise AssertionError(f"{told}\n{error}") from error


def _is_servers_own(answer: Any) -> bool:
    """Whether a 500 on `/v2` is the model server's own answer, whose status and words go through as they are."""
    path = answer.request.path_url
    return path.startswith("/v2/repository/models/") and "failed to load" in answer.json()["error"]


def _is_head_refused(answer: Any) -> bool:
    """Whether the server's own parser refused the request's head, which no operation declares."""
    return answer.status_code == 400 and answer.content == b"Invalid HTTP request received."
