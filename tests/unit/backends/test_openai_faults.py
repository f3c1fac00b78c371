import orjson
import pytest

from gateway.backends.llm.openai_faults import UpstreamError, Waiting, error_of, fault_in_answer, fault_of
from gateway.core.errors import FaultKind as K
from gateway.core.texts import GENERIC_REFUSAL, MAX_REPLY


def body(**error):
    return orjson.dumps({"error": {"message": "m", "type": "t", "param": None, "code": None} | error})


BAD = body(message="max_tokens must be positive", param="max_tokens", code="invalid_value")


@pytest.mark.parametrize(
    ("status", "answer", "kind"),
    [
        (400, BAD, K.REFUSED_INPUT),
        (400, b"<html>", K.REFUSED_INPUT),
        (404, BAD, K.REFUSED_INPUT),
        (409, BAD, K.REFUSED_INPUT),
        (413, BAD, K.REFUSED_INPUT),
        (400, body(code="content_filter"), K.REFUSED_INPUT),
        (400, body(code="content_policy_violation"), K.REFUSED_INPUT),
        (403, body(code="content_policy_violation"), K.REFUSED_INPUT),
        (404, b'{"detail":"Not Found"}', K.UNSUPPORTED),
        (404, body(message="File Not Found", type="not_found_error", code=404), K.UNSUPPORTED),
        (404, body(message="Invalid URL (POST /v1/responses)", type="invalid_request_error"), K.UNSUPPORTED),
        (501, body(message="This server does not support embeddings", type="not_supported_error"), K.UNSUPPORTED),
        (501, body(), K.UNSUPPORTED),
        (400, body(message="smollm2 is not a multimodal model", type="BadRequestError", code=400), K.UNSUPPORTED),
        (400, body(message="image input is not supported", code=400), K.UNSUPPORTED),
        (500, body(message="image input is not supported", code=500), K.UNSUPPORTED),
        (400, body(message="'temperature' is not supported", code="unsupported_value"), K.REFUSED_INPUT),
        (413, b"<html>nginx", K.REFUSED_INPUT),
        (422, BAD, K.REFUSED_INPUT),
        (404, b"<html>nginx", K.BROKEN),
        (409, b"", K.BROKEN),
        (404, body(code="model_not_found"), K.UNKNOWN_MODEL),
        (400, body(code="model_not_found"), K.UNKNOWN_MODEL),
        (404, body(param="model", code=404, type="NotFoundError"), K.UNKNOWN_MODEL),
        (404, body(message='model "x" not found, try pulling it first'), K.UNKNOWN_MODEL),
        (404, body(message="The model `x` does not exist."), K.UNKNOWN_MODEL),
        (401, body(message="Incorrect API key"), K.DENIED),
        (402, body(), K.DENIED),
        (403, body(), K.DENIED),
        (405, body(), K.BROKEN),
        (408, b"", K.TIMEOUT),
        (504, b"", K.TIMEOUT),
        (429, body(), K.OVERLOADED),
        (429, body(code="insufficient_quota"), K.DENIED),
        (503, b"", K.OVERLOADED),
        (503, body(type="unavailable_error", message="Loading model", code=503), K.UNAVAILABLE),
        (529, body(), K.OVERLOADED),
        (500, b"<html>", K.BROKEN),
        (502, body(), K.BROKEN),
        (302, b"", K.BROKEN),
        (204, b"", K.BROKEN),
    ],
)
def test_kinds(status, answer, kind):
    assert fault_of(status, answer, Waiting()).kind is kind


def test_a_refusal_keeps_what_a_user_can_act_on():
    fault = fault_of(400, BAD, Waiting())
    assert (fault.message, fault.field, fault.code) == (
        "max_tokens must be positive",
        "max_tokens",
        "invalid_value",
    )


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
def test_a_refusal_keeps_its_status(status):
    assert fault_of(status, BAD, Waiting()).status == status


def test_other_faults_have_no_status_for_the_caller():
    assert [fault_of(status, BAD, Waiting()).status for status in (401, 403, 408, 429, 500, 503)] == [0] * 6
    assert fault_of(403, body(code="content_filter"), Waiting()).status == 400


VLLM = "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input tokens"
TOO_LONG = {
    "openai": (400, body(message=VLLM, code="context_length_exceeded", param="messages")),
    "vllm": (400, body(message=VLLM, type="BadRequestError", param="input_tokens", code=400)),
    "vllm, more asked for than there is": (
        400,
        body(message="max_tokens=5000 cannot be greater than max_model_len=1024.", param="max_tokens", code=400),
    ),
    "llama.cpp": (
        400,
        body(
            message="request (3031 tokens) exceeds the available context size (256 tokens), try increasing it",
            type="exceed_context_size_error",
            code=400,
        ),
    ),
    "sglang": (400, body(message="The input (9000 tokens) is longer than the model's context length (4096 tokens).")),
    "sglang, with the output": (
        400,
        body(message="Requested token count exceeds the model's maximum context length of 4096 tokens."),
    ),
    "tensorrt-llm": (
        400,
        body(message="The sum of prompt length (72417.0), query length (0) should not exceed max_num_tokens (69632)"),
    ),
    "tensorrt-llm's executor": (500, body(message="Prompt length (5056) exceeds maximum input length (2048).")),
    "too large": (413, body(message="prompt is too long: 250000 tokens > 200000 maximum")),
}


@pytest.mark.parametrize(("status", "answer"), TOO_LONG.values(), ids=TOO_LONG)
def test_a_context_that_is_too_long(status, answer):
    fault = fault_of(status, answer, Waiting())
    assert (fault.kind, fault.status, fault.code) == (K.CONTEXT_TOO_LONG, 400, "context_length_exceeded")
    assert "tokens" in fault.message or "length" in fault.message


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (400, body(message="'name' exceeds the maximum allowed length of 64")),
        (400, body(message="Invalid 'messages[0].content': string too long", code="string_above_max_length")),
        (400, body(message="max_tokens is too large: 100000. This model supports at most 16384 completion tokens")),
        (429, body(message="Request too large: Limit 10000 tokens, requested 20000", code="rate_limit_exceeded")),
    ],
)
def test_what_is_too_long_for_another_reason(status, answer):
    assert fault_of(status, answer, Waiting()).kind is not K.CONTEXT_TOO_LONG


def test_used_up_quota_is_not_mended_by_waiting():
    waiting = Waiting(retry_after="7")
    assert fault_of(429, body(type="insufficient_quota"), waiting).retry_after_us is None
    assert fault_of(429, body(), waiting).retry_after_us == 7_000_000
    assert fault_of(503, b"", waiting).retry_after_us == 7_000_000


def test_a_field_is_named_as_the_caller_wrote_it():
    assert fault_of(400, body(param="body.max_tokens"), Waiting()).field == "max_tokens"


def test_a_refusal_shows_no_internals():
    fault = fault_of(400, body(message="ValueError: at http://10.0.0.1:8000", code=400, param="a\nb"), Waiting())
    assert (fault.message, fault.field, fault.code) == (GENERIC_REFUSAL, None, None)


def test_our_key_is_not_in_the_log_text():
    assert "sk-abc" not in fault_of(401, body(message="Incorrect API key: sk-abcdefghijk"), Waiting()).message


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b'{"error":"boom"}', UpstreamError(message="boom")),
        (b'{"error":true}', UpstreamError()),
        (b'{"error":null}', None),
        (b'{"error":{}}', None),
        (
            b'{"object":"error","message":"m","type":"BadRequestError","param":null,"code":400}',
            UpstreamError(message="m", type="BadRequestError", code=400),
        ),
        (b'{"detail":"Not Found"}', UpstreamError(message="Not Found")),
        (
            b'{"detail":[{"loc":["body","messages",0,"role"],"msg":"bad role"}]}',
            UpstreamError(message="bad role", param="messages.0.role"),
        ),
        (b'{"detail":[]}', UpstreamError()),
        (b'{"choices":[]}', None),
        (b"[1]", None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_shapes_of_errors(answer, error):
    assert error_of(answer) == error


@pytest.mark.parametrize(
    ("waiting", "us"),
    [
        (Waiting(), None),
        (Waiting(retry_after="7"), 7_000_000),
        (Waiting(retry_after="0.5"), 500_000),
        (Waiting(retry_after="7", retry_after_ms="120"), 120_000),
        (Waiting(retry_after="-1"), None),
        (Waiting(retry_after="nan"), None),
        (Waiting(retry_after="inf"), None),
        (Waiting(retry_after="soon"), None),
        (Waiting(retry_after="1e12"), 86_400_000_000),
        (Waiting(retry_after="1e305"), 86_400_000_000),  # in microseconds more than a float holds
        (Waiting(retry_after="1e400"), None),
        (Waiting(retry_after="Mon, 05 Jan 2026 10:00:09 GMT"), None),
        (Waiting(retry_after="Mon, 05 Jan 2026 10:00:09 GMT", date="Mon, 05 Jan 2026 10:00:00 GMT"), 9_000_000),
        (Waiting(retry_after="Mon, 05 Jan 2026 09:00:00 GMT", date="Mon, 05 Jan 2026 10:00:00 GMT"), 0),
        (Waiting(retry_after="x", date="Mon, 05 Jan 2026 10:00:00 GMT"), None),
        (Waiting(retry_after=f"Mon, 05 Jan {10**20} 10:00:00 GMT", date="Mon, 05 Jan 2026 10:00:00 GMT"), None),
        (Waiting(retry_after="Mon, 05 Jan 2026 10:00:00 GMT", date=f"Mon, 05 Jan 2026 10:00:00 +{10**20}"), None),
        (Waiting(retry_after="Mon, 05 Jan 2026 10:00:09 -0000", date="Mon, 05 Jan 2026 10:00:00 GMT"), None),
    ],
)
def test_when_to_come_back(waiting, us):
    assert fault_of(429, b"", waiting).retry_after_us == us


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UpstreamError(message="x"), K.FAILED),
        (UpstreamError(message="image input is not supported"), K.UNSUPPORTED),
        (UpstreamError(code=429), K.OVERLOADED),
        (UpstreamError(code="429"), K.OVERLOADED),
        (UpstreamError(code="9" * 5000), K.FAILED),  # more digits than Python reads
        (UpstreamError(code="rate_limit"), K.FAILED),
        (UpstreamError(code=400, message="too long"), K.REFUSED_INPUT),
        (UpstreamError(code=500), K.FAILED),
        (UpstreamError(code="server_error"), K.FAILED),
        (UpstreamError(code="rate_limit_exceeded"), K.OVERLOADED),
        (UpstreamError(code="insufficient_quota"), K.DENIED),
        (UpstreamError(code="content_filter"), K.REFUSED_INPUT),
        (UpstreamError(code="context_length_exceeded"), K.CONTEXT_TOO_LONG),
        (UpstreamError(message=VLLM), K.CONTEXT_TOO_LONG),
    ],
)
def test_errors_that_come_with_status_200(error, kind):
    assert fault_in_answer(error).kind is kind


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"message": "model " * 100_000, "type": "x" * 600_000, "param": "y" * 600_000}},
        {"error": "model " * 100_000},
        {"detail": "model " * 100_000},
        {"detail": [{"msg": "model " * 100_000, "loc": ["body", "z" * 600_000]}]},
    ],
)
def test_only_the_beginning_of_a_long_text_is_looked_at(answer):
    error = error_of(orjson.dumps(answer))
    assert error is not None
    assert all(len(part) <= MAX_REPLY for part in (error.message, error.type, error.param) if isinstance(part, str))
