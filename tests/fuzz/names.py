"""The table of attacks by names and addresses: every bad one at every place of both planes that takes one."""

import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from gateway.admin.access.roles import PREFIX
from tests.fuzz.attacks import CHAT, EMBED, JSON, admin_paths, request
from tests.fuzz.making import NASTY
from tests.fuzz.wire import Attack

# --- names ----------------------------------------------------------------------------------------

HEADERS: Final = (
    "x-request-id", "x-timeout-ms", "x-priority", "x-ordering-key", "x-session-id", "x-sequence-id",
    "x-sequence-start", "x-sequence-end",
    "idempotency-key", "traceparent", "tracestate", "authorization", "x-api-key", "cache-control", "accept",
    "accept-encoding", "content-type",
    "content-encoding", "inference-header-content-length", "origin", "host", "expect", "connection", "te", "range",
    "if-match", "x-change-reason",
    "x-csrf-token", "cookie", "user-agent", "x-gateway-backend", "x-forwarded-for", "access-control-request-method",
    "sec-websocket-protocol",
)  # fmt: skip


def names(key: str) -> Iterator[Attack]:
    """Each bad name at each place of the data plane that takes one."""
    for at, name in enumerate(NASTY):
        told = f"name {at} {name[:20]!r}"
        for spelled in {_quoted(name), _quoted(name, safe="/%"), _raw(name)}:
            for method, path in (
                ("GET", "/v1/tasks/{}"), ("POST", "/v1/tasks/{}"), ("GET", "/v1/models/{}"), ("GET", "/v2/models/{}"),
                ("POST", "/v2/models/{}/infer"),
                ("POST", "/v2/models/{}/generate"), ("GET", "/v2/models/{}/config"), ("GET", "/v2/models/{}/ready"),
                ("GET", "/v2/models/{}/stats"),
                ("POST", "/v2/models/text_embedding/versions/{}/infer"), ("GET",
                "/v2/models/text_embedding/versions/{}/config"), ("GET", "/{}"),
                ("POST", "/v2/repository/models/{}/load"), ("POST", "/v2/repository/models/{}/unload"), ("GET",
                "/v1/tasks/{}/stream"), ("GET", "/v1/tasks?{}"),
            ):  # fmt: skip
                if len(spelled) < 20_000:
                    yield Attack(
                        name=f"{method} {path}: {told}",
                        parts=[request(method, path.format(spelled), key, b"{}" if method == "POST" else b"", JSON)],
                    )
        for header in HEADERS:
            lines = (f"{header}: {name}",)
            for path, body in (
                ("/v1/tasks/text-embedding", EMBED),
                ("/v1/chat/completions", CHAT),
                ("/v2/models/text_embedding/infer", b'{"inputs":[]}'),
            ):
                yield Attack(
                    name=f"{path}: {header}: {told}", parts=[request("POST", path, key, body, JSON, *lines)], most=2
                )
        for path, document in _documents(name):
            body = json.dumps(document).encode()
            yield Attack(name=f"{path}: {json.dumps(document)[:60]}", parts=[request("POST", path, key, body, JSON)])
        for field in ("name", "filename"):
            part = (
                f'--b\r\ncontent-disposition: form-data; name="image"; {field}="{name}"\r\n\r\nx\r\n--b--\r\n'.encode(
                    "utf-8", "surrogatepass"
                )
            )
            line = "content-type: multipart/form-data; boundary=b"
            yield Attack(
                name=f"multipart {field}: {told}",
                parts=[request("POST", "/v1/tasks/image-classification", key, part, line)],
            )


def _raw(name: str) -> str:
    """As it is, but for what would end the request line."""
    return name.replace(" ", "%20").replace("\r", "%0d").replace("\n", "%0a")


def _quoted(name: str, safe: str = "") -> str:
    return quote(name, safe=safe, errors="surrogatepass")


def _documents(name: str) -> Iterator[tuple[str, Any]]:
    """Bodies with a bad name in each place."""
    yield "/v1/infer", {"task": name, "input": {}}
    yield "/v1/infer", {"task": "text-embedding", "input": {name: name}}
    yield (
        "/v1/infer",
        {"task": "text-embedding", "input": {"text": name}, "parameters": {name: name}, "ordering_key": name},
    )
    yield "/v1/infer/batch", {"requests": [{"id": name, "task": "text-embedding", "input": {"text": name}}]}
    yield "/v1/tasks/custom_nlu", {"input": {"text": name, "labels": [name, "b"]}}
    yield "/v1/tasks/image-classification", {"input": {"image": name}}
    yield "/v1/tasks/speech-activity", {"input": {"audio": name}}
    yield "/v1/chat/completions", {"model": name, "messages": [{"role": "user", "content": "hi"}]}
    yield (
        "/v1/chat/completions",
        {"model": "general_llm", "user": name, name: name, "messages": [{"role": name, "name": name, "content": name}]},
    )
    yield "/v1/completions", {"model": "general_llm", "prompt": name, "suffix": name}
    yield "/v1/responses", {"model": "general_llm", "input": name, "instructions": name, "previous_response_id": name}
    yield "/v1/embeddings", {"model": "text-embedding", "input": name, "encoding_format": name}
    yield "/v1/client-tokens", {"tasks": [name], "origins": [name], "ttl_s": 60}
    tensor = {"name": name, "datatype": "BYTES", "shape": [1], "data": [name]}
    yield "/v2/models/text_embedding/infer", {"id": name, "inputs": [tensor], "outputs": [{"name": name}]}
    yield (
        "/v2/models/text_embedding/infer",
        {"inputs": [tensor | {"datatype": name}], "parameters": {name: name, "sequence_id": name}},
    )
    yield "/v2/models/text_embedding/generate", {name: name, "TEXT": name}
    yield "/v2/repository/models/nothing/load", {"parameters": {f"file:{name}": "YQ==", "config": name}}
    yield "/v2/repository/models/nothing/load", {"parameters": {f"file:1/{name}": "YQ=="}}
    yield (
        "/v2/repository/models/nothing/load",
        {"parameters": {"config": json.dumps({"name": name, "parameters": {name: {"string_value": name}}})}},
    )


def admin_names(key: str) -> Iterator[Attack]:
    """The same on the control plane: in its paths, its bodies and its headers."""
    rule = {
        "name": "x",
        "match": {"task": "text-embedding"},
        "split": [{"backend": "local", "model": "text_embedding"}],
    }
    for at, name in enumerate(NASTY):
        told = f"name {at} {name[:20]!r}"
        for spelled in {_quoted(name), _raw(name)}:
            if len(spelled) < 20_000:
                for method, path in admin_paths(spelled or "%20"):
                    if not path.endswith("/session"):
                        yield Attack(
                            name=f"{method} {path[:80]}: {told}",
                            parts=[request(method, path, key, b"{}" if method != "GET" else b"", JSON)],
                        )
        for path, document in (
            ("/rules/validate", {"rules": [rule | {"name": name}]}),
            ("/rules/validate", {"rules": [rule | {"match": {"task": name, "tenant": name, "headers": {name: name}}}]}),
            ("/rules/validate", {"rules": [rule | {"split": [{"backend": name, "model": name, "version": name}]}]}),
            ("/rules/dry-run", {"rules": [rule | {"name": name}], "requests": [{"task": name, "tenant": name}]}),
            ("/explain", {"task": name, "tenant": name, "model": name, "headers": {name: name}}),
            ("/keys", {"id": name, "tenant": name, "tasks": [name], "models": [name], "origins": [name]}),
            ("/switches", {"kind": name, "scope": {"tenant": name}, "reason": name, "owner": name}),
            ("/rollouts", {"rule": name, "to": name, "steps": [name]}),
            ("/models/text_embedding/load", {"backend": name, "config": name}),
            ("/models/nothing/deploy", {"backend": name, "version": name}),
            ("/models/nothing/deploy", {"version": name, "path": name, "url": name}),
        ):
            yield Attack(
                name=f"{path}: {told}", parts=[request("POST", PREFIX + path, key, json.dumps(document).encode(), JSON)]
            )
        for header in HEADERS:
            if header not in ("authorization", "x-api-key"):
                lines = (f"{header}: {name}",)
                yield Attack(
                    name=f"GET rules: {header}: {told}",
                    parts=[request("GET", f"{PREFIX}/rules", key, b"", *lines, framing="")],
                    most=2,
                )
                body = json.dumps({"rules": []}).encode()
                yield Attack(
                    name=f"validate: {header}: {told}",
                    parts=[request("POST", f"{PREFIX}/rules/validate", key, body, JSON, *lines)],
                    most=2,
                )
        for query in (
            "/audit?actor={}",
            "/requests?tenant={}",
            "/usage?by={}",
            "/rules/diff?from={}",
            "/audit?cursor={}",
            "/requests?after={}",
            "/overview?window={}",
        ):
            path = PREFIX + query.format(_quoted(name))
            yield Attack(name=f"GET {path[:80]}", parts=[request("GET", path, key, b"")])


# --- addresses ------------------------------------------------------------------------------------


def addresses(key: str, port: int) -> Iterator[Attack]:
    """Addresses wherever some gateway would open them; `port` is that of a listener which must hear nothing."""
    urls = [
        f"http://127.0.0.1:{port}/a.png", f"https://127.0.0.1:{port}/a.png", f"http://2130706433:{port}/",
        f"http://0x7f000001:{port}/", f"http://[::1]:{port}/",
        f"http://[::ffff:127.0.0.1]:{port}/", f"http://localhost:{port}/", f"http://0:{port}/",
        f"http://127.1:{port}/", f"ftp://127.0.0.1:{port}/a",
        f"gopher://127.0.0.1:{port}/_x", f"//127.0.0.1:{port}/a", f"http://a@127.0.0.1:{port}/", "file:///etc/passwd",
        "file://localhost/etc/passwd",
        "data:image/png;base64,iVBORw0KGgo=", "data:text/html,<script>", f"HTTP://127.0.0.1:{port}/a",
        f" http://127.0.0.1:{port}/", f"unix:///tmp/x:{port}",
    ]  # fmt: skip
    for url in urls:
        part = {"type": "image_url", "image_url": {"url": url}}
        chat = {
            "model": "general_llm",
            "messages": [
                {
                    "role": "user",
                    "content": [part, {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}],
                }
            ],
        }
        own = dict.fromkeys(
            (
                "api_base",
                "base_url",
                "endpoint",
                "proxy",
                "webhook",
                "callback_url",
                "organization",
                "custom_llm_provider",
            ),
            url,
        )
        for path, document in (
            ("/v1/tasks/image-classification", {"input": {"image": url}}),
            ("/v1/tasks/image-classification", {"input": {"image": {"url": url}}}),
            ("/v1/tasks/speech-activity", {"input": {"audio": url}}),
            ("/v1/infer", {"task": "image-classification", "input": {"image": url}}),
            ("/v1/infer/batch", {"requests": [{"task": "image-classification", "input": {"image": url}}]}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**json.loads(CHAT), **own, "extra_headers": {"host": url}, "extra_body": own,
            "metadata": own}),
            ("/v1/chat/completions", {**json.loads(CHAT), "tools": [{"type": "mcp", "server_url": url}],
            "web_search_options": {"url": url}}),
            ("/v1/responses", {"model": "general_llm", "input": [{"role": "user", "content": [{"type": "input_image",
            "image_url": url}]}], "tools": []}),
            ("/v1/completions", {"model": "general_llm", "prompt": "hi", **own}),
            ("/v1/embeddings", {"model": "text-embedding", "input": url, **own}),
            ("/v2/repository/models/nothing/load", {"parameters": {"config": json.dumps({"name": "nothing",
            "default_model_filename": url})}}),
        ):  # fmt: skip
            yield Attack(name=f"{path}: {url}", parts=[request("POST", path, key, json.dumps(document).encode(), JSON)])
        lines = (f"host: 127.0.0.1:{port}", f"authorization: Bearer {key}", "connection: close", "", "")
        head = f"GET {url.strip()} HTTP/1.1\r\n" + "\r\n".join(lines)
        yield Attack(name=f"request line {url}", parts=[head.encode()])
        lines = (
            f"x-forwarded-host: {url}",
            f"x-original-url: {url}",
            f"referer: {url}",
            f"origin: {url}",
            f"x-upstream: {url}",
        )
        yield Attack(name=f"headers {url}", parts=[request("POST", "/v1/chat/completions", key, CHAT, JSON, *lines)])
