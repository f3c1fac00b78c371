import pytest

from gateway.backends.triton_faults import fault_of, wrong_names
from gateway.core.errors import FaultKind as K


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("UNAVAILABLE", "[request id: <id_unknown>] Exceeds maximum queue size", K.OVERLOADED),
        ("UNAVAILABLE", "Request timeout expired", K.OVERLOADED),
        ("UNAVAILABLE", "Stream removed (Socket closed)", K.UNAVAILABLE),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1", K.UNAVAILABLE),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", K.TIMEOUT),
        ("NOT_FOUND", "Request for unknown model: 'nope' is not found", K.UNKNOWN_MODEL),
        ("NOT_FOUND", "Request for unknown model: 'std' version 7 is not found", K.UNKNOWN_MODEL),
        ("NOT_FOUND", "Request for unknown model: 'm' has no available versions", K.UNKNOWN_MODEL),
        ("NOT_FOUND", "no such label", K.REFUSED_INPUT),
        ("INVALID_ARGUMENT", "unexpected inference input 'Q' for model 'std'", K.MISFIT),
        ("INVALID_ARGUMENT", "unexpected inference output 'NOPE' for model 'std'", K.MISFIT),
        (
            "INVALID_ARGUMENT",
            "[request id: x] inference input 'X' data-type is 'FP32', but model 's' expects 'INT32'",
            K.MISFIT,
        ),
        ("INVALID_ARGUMENT", "[request id: x] expected 2 inputs but got 1 inputs for model 'two'.", K.MISFIT),
        ("INVALID_ARGUMENT", "[request id: x] inference request batch-size must be <= 4 for 'std'", K.MISFIT),
        ("INVALID_ARGUMENT", "in ensemble 'image_classification', IMAGE: not a decodable image", K.REFUSED_INPUT),
        (
            "INVALID_ARGUMENT",
            "failed to get model version from specified version string 'abc' (details: stoll)",
            K.UNKNOWN_MODEL,
        ),
        ("INTERNAL", "Stub process 'm_0_0' is not healthy.", K.BROKEN),
        ("INTERNAL", "Received RST_STREAM with error code 2", K.UNAVAILABLE),
        ("INTERNAL", "Failed to process the request(s) for model 'bad_0_0', message: ValueError: x", K.FAILED),
        ("UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled transaction policy", K.UNSUPPORTED),
        ("CANCELLED", "x", K.UNAVAILABLE),
        ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (5 vs. 4)", K.REFUSED_INPUT),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (5 vs. 4)", K.REFUSED_INPUT),
        ("RESOURCE_EXHAUSTED", "CLIENT: Sent message larger than max (102 vs. 10)", K.REFUSED_INPUT),
        ("RESOURCE_EXHAUSTED", "Stream removed (CLIENT: Received message larger than max (5 vs. 4))", K.BROKEN),
        ("RESOURCE_EXHAUSTED", "out of memory", K.BROKEN),
        ("UNAUTHENTICATED", "no token", K.BROKEN),
        ("UNKNOWN", "", K.BROKEN),
        ("DATA_LOSS", "x", K.BROKEN),
    ],
)
def test_kinds(code, text, kind):
    assert fault_of(code, text).kind is kind


def test_a_refusal_is_cleaned_and_everything_else_is_for_logs():
    refusal = fault_of("INVALID_ARGUMENT", "in ensemble 'e', [request id: 7] bad input 'X' for model 'm'")
    assert refusal.message == "bad input 'X' for the model"
    assert fault_of("INTERNAL", "a\nb").message == "INTERNAL: a b"


@pytest.mark.parametrize(
    ("got", "wanted", "wrong"),
    [
        (["A", "B"], [], None),
        (["B", "A"], ["A"], None),
        (["A"], ["A", "B"], "outputs are missing: B"),
        (["A", "A"], [], "outputs come more than once: A, A"),
    ],
)
def test_output_names(got, wanted, wrong):
    assert wrong_names(got, wanted) == wrong
