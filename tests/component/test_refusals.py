"""What the door refuses: one gateway for the whole file, because nothing here reaches a backend."""

import httpx
import pytest
import pytest_asyncio

from gateway.backends.scripted import ScriptedBackend
from gateway.core.types import Message
from tests.kit.app import embedding, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
EMBED = "/v1/tasks/text-embedding"
IMAGE = "/v1/tasks/image-classification"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TEXT = {"input": {"text": "hello"}}
ASK = {"model": "general_llm", "messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def one_gateway():
    backends = [ScriptedBackend("triton", [embedding()]), ScriptedBackend("llm", [Message(body=b"{}")])]
    async with running(backends, max_body_bytes=3_000_000) as gw:
        yield gw


@pytest.fixture
def gw(one_gateway):
    """The gateway with nothing seen yet."""
    for backend in one_gateway.backends.values():
        backend.calls.clear()
    one_gateway.seen.at_the_door.clear()
    return one_gateway


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": {"text": 5}}, "input.text"),
        ({"input": {"text": ""}}, "input.text"),
        ({"input": {"text": "   "}}, "input.text"),
        ({"input": {"text": []}}, "input.text"),
        ({"input": {"text": ["a", None]}}, "input.text[1]"),
        ({"input": {"text": ["a"] * 5}}, "input.text"),
        ({"input": {"text": "x" * 100_000}}, "input.text"),
        ({"input": {}}, "input.text"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({}, "input"),
        ({"input": {"text": "a", "txt": "b"}}, "input.txt"),
        ({"input": {"text": "a"}, "parameters": []}, "parameters"),
        ({"input": {"text": "a"}, "parameters": {"truncate": 1}}, "parameters.truncate"),
        ({"input": {"text": "a"}, "parameters": {"x": 1}}, "parameters.x"),
    ],
)
async def test_a_wrong_input_is_a_422_that_names_the_field(gw, body, field):
    answer = await gw.post(EMBED, body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
    assert answer.json()["errors"][0]["field"] == field
    assert not gw.backends["triton"].calls
    assert [r.code for r in gw.seen.at_the_door] == ["invalid_input"]


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "malformed_request"),
        (b"[]", "application/json", 400, "malformed_request"),
        (b"null", "application/json", 400, "malformed_request"),
        (b'"x"', "application/json", 400, "malformed_request"),
        (b"", "application/json", 400, "malformed_request"),
        (b"\xff\xfe", "application/json", 400, "malformed_request"),
        (b'{"input": {"text": "\\ud83d"}}', "application/json", 400, "malformed_request"),
        (b'{"input": {"text": NaN}}', "application/json", 400, "malformed_request"),
        (b"[" * 100_000, "application/json", 400, "malformed_request"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"{}", "", 415, "unsupported_media_type"),
        (b"x", "image/png", 415, "unsupported_media_type"),
        (b"x", "multipart/form-data", 400, "malformed_request"),
        (b"x", "multipart/form-data; boundary=y", 400, "malformed_request"),
        (b'{"inptu": 1}', "application/json", 400, "malformed_request"),
    ],
)
async def test_a_malformed_body_is_never_a_500(gw, content, kind, status, code):  # SC-12
    answer = await gw.http.post(EMBED, content=content, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["code"]) == (status, code)


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Basic c2VjcmV0LW9uZTo=", "secret-one", "Bearer \xe9"]
)
async def test_without_a_key_nothing_is_read(gw, authorization):
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    async with httpx.AsyncClient(base_url=gw.url, trust_env=False) as stranger:
        answer = await stranger.post(EMBED, content=b"{", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert gw.seen.at_the_door[0].code == "unauthorized"


@pytest.mark.parametrize("cut", [0, 10, 70, 120, 150])
async def test_a_multipart_body_that_was_cut_is_a_400(gw, cut):
    part = (
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\nimage\r\n'
        b'--b\r\nContent-Disposition: form-data; name="top_k"\r\n\r\n2\r\n'
    )
    answer = await gw.http.post(IMAGE, content=part[:cut], headers={"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_request")


@pytest.mark.parametrize(
    ("fields", "files", "query"),
    [
        ({"image": "AAAA"}, [("image", b"x")], ""),
        ({}, [("image", b"x"), ("image", b"y")], ""),
        ({}, [("image", b"x"), ("file", b"y")], ""),
        ({}, [], "?image=AAAA"),
    ],
)
async def test_two_files_for_one_field_are_refused(gw, fields, files, query):
    if files:
        answer = await gw.http.post(IMAGE, data=fields, files=[(name, ("f", raw)) for name, raw in files])
    else:
        answer = await gw.http.post(IMAGE + query, content=b"x", headers={"content-type": "image/png"})
    assert (answer.status_code, answer.json()["detail"]) == (422, "is given twice")
    assert answer.json()["errors"][0]["field"] == "input.image"


async def test_a_number_that_is_given_twice_is_refused(gw):
    answer = await gw.http.post(IMAGE + "?top_k=2&top_k=3", content=b"x", headers={"content-type": "image/png"})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "input.top_k")


@pytest.mark.parametrize(
    ("path", "takes"),
    [
        (EMBED, "send application/json, multipart/form-data"),
        (IMAGE, "send application/json, multipart/form-data, image/*"),
    ],
)
async def test_a_body_of_another_kind_is_told_what_is_taken(gw, path, takes):
    answer = await gw.http.post(path, content=b"a=b", headers={"content-type": "application/x-www-form-urlencoded"})
    assert (answer.status_code, answer.json()["detail"]) == (415, takes)


async def test_an_address_in_the_place_of_an_image_is_told_so(gw):
    answer = await gw.post(IMAGE, {"input": {"image": "https://example.com/cat.jpg"}})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "input.image")
    assert "not fetched" in answer.json()["detail"]


@pytest.mark.parametrize(
    "parts", [b"[]," * 400_000 + b"[]", b"1," * 1_100_000 + b"1", b'{"":0' + b',"b":1' * 2**18 + b"}"]
)
async def test_json_of_very_many_parts_is_refused_before_it_is_parsed(gw, parts):
    gw.http.timeout = 10
    body = b'{"input": {"text": [' + parts + b"]}}"
    answer = await gw.http.post(EMBED, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_brackets_in_a_text_are_no_parts(gw):
    answer = await gw.post(EMBED, {"input": {"text": "[1,2],{" * 300_000 + '\\"[:\\\\'}})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "input.text")


async def test_a_slash_too_many_is_a_404(gw):
    answer = await gw.http.post(EMBED + "/", json=TEXT)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_a_charset_of_the_callers_choosing_makes_no_text_that_is_none(gw):
    part = b'--b\r\nContent-Disposition: form-data; name="text"\r\n\r\n\\ud800\r\n--b--\r\n'
    for charset in ("unicode_escape", "utf-16", "nonsense"):
        kind = f"multipart/form-data; charset={charset}; boundary=b"
        answer = await gw.http.post(EMBED, content=part, headers={"content-type": kind})
        assert answer.status_code == 200  # read as the UTF-8 text that it is: a backslash and so on
    bad = part.replace(b"\\ud800", b"\xff\xfe")
    answer = await gw.http.post(EMBED, content=bad, headers={"content-type": "multipart/form-data; boundary=b"})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_request")


@pytest.mark.parametrize(("name", "value"), [("x-timeout-ms", "soon"), ("x-timeout-ms", "0"), ("x-timeout-ms", "-5")])
async def test_bad_headers_are_named(gw, name, value):
    answer = await gw.post(EMBED, TEXT, **{name: value})
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["field"] == name


@pytest.mark.parametrize("given", ["x" * 129, "a b", "a\tb", 'a"b', "%0d%0aSet-Cookie:x"])
async def test_an_unsafe_request_id_is_replaced(gw, given):  # SC-09
    answer = await gw.post(EMBED, TEXT, **{"x-request-id": given})
    assert answer.headers["x-request-id"] != given
    assert answer.json()["id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"image": "***"}, "input.image"),
        ({"image": ""}, "input.image"),
        ({"image": "data:image/png,abc"}, "input.image"),
        ({"image": 5}, "input.image"),
        ({}, "input.image"),
        ({"image": "AAAA", "top_k": 0}, "input.top_k"),
        ({"image": "AAAA", "top_k": True}, "input.top_k"),
        ({"image": "AAAA", "top_k": 4}, "input.top_k"),
    ],
)
async def test_wrong_image_inputs_are_named(gw, given, field):
    answer = await gw.post(IMAGE, {"input": given})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"tools": "x"}, "tools"),
        ({"tools": ["x"]}, "tools"),
        ({"response_format": "json"}, "response_format"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": True}, "top_p"),
    ],
)
async def test_a_wrong_chat_body_is_a_422_that_names_the_field(gw, change, field):  # SC-13
    answer = await gw.post(CHAT, {**ASK, **change})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == field
    assert not gw.backends["llm"].calls


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": {"x": 1}}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", None]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [[1], ["a"]]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": 5}, "input"),
        (RESPONSES, {"input": ["a"]}, "input[0]"),
        (RESPONSES, {"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        (RESPONSES, {"input": [{"role": "user", "content": [{}]}]}, "input[0].content[0]"),
        (RESPONSES, {"input": "a", "instructions": 5}, "instructions"),
        (RESPONSES, {"input": "a", "background": True}, "background"),
        (RESPONSES, {"input": "a", "text": "json"}, "text"),
        (RESPONSES, {"input": "a", "tools": {}}, "tools"),
        (RESPONSES, {"input": "a", "stream": "yes"}, "stream"),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"input": "a", "top_p": 2}, "top_p"),
    ],
)
async def test_a_wrong_body_of_the_other_generative_paths_names_the_field(gw, path, body, field):  # SC-13
    answer = await gw.post(path, {"model": "general_llm", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, field)
    assert not gw.backends["llm"].calls


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "\\ud83d"}',
        b'{"model": "general_llm", "prompt": "\\ud83d", "input": "\\ud83d"}',
        b'{"model": "general_llm", "n": NaN}',
    ],
)
async def test_a_malformed_generative_body_is_a_400(gw, path, content):
    answer = await gw.http.post(path, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_request")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize(("model", "status"), [(None, 400), (5, 400), ("nope", 404), ("minilm", 404)])
async def test_unknown_models(gw, path, model, status):  # SC-13
    answer = await gw.post(path, {**ASK, "model": model})
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == "model"
    if status == 404:
        assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [1, 2]}, "input[0]"),
        ({"input": "x" * 100_000}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 2}, "dimensions"),
    ],
)
async def test_wrong_embedding_bodies_are_named(gw, change, param):  # SC-13
    answer = await gw.post("/v1/embeddings", {"model": "minilm", "input": "a", **change})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/embeddings", "/v1/v1/chat/completions"])
async def test_a_base_url_that_does_not_end_with_one_v1_is_told_as_clients_show_it(gw, path):
    answer = await gw.http.post(path, json=ASK)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "there is no such path; a client's base URL ends with one /v1"


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/files", "/v1/chat/completion"])
async def test_a_path_of_openai_that_is_not_here_is_told_in_openais_form(gw, path):
    answer = await gw.http.post(path, json=ASK)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "there is no such path; /openapi.json lists them"
