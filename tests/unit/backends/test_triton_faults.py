import pytest

from gateway.backends.triton.faults import fault_of, lost, streamed, wrong_names
from gateway.core.errors import FaultKind as K
from gateway.core.errors import Reply


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
        ("INTERNAL", "Stub process 'm_0_0' is not healthy.", K.DEAD),
        ("INTERNAL", "ValueError: no 'Received RST_STREAM with error code 2' here", K.FAILED),  # a model's own words
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


BLS = "Failed to process the request(s) for model 'b_0_0', message: TritonModelException: "


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Stub process 'm_0_0' is not healthy.", "m"),
        ("Stub process 'my_model_2_10' is not healthy.", "my_model"),
        ("in ensemble 'e', Stub process 'm_0_0' is not healthy.", "m"),
        (BLS + "Stub process 'm_0_0' is not healthy.\n\nAt:\n  /x/model.py(9): execute\n", "m"),
        ("Stub process 'gpus_0' is not healthy.", ""),
    ],
)
def test_a_dead_process_names_its_model(text, model):
    found = fault_of("INTERNAL", text)
    assert (found.kind, found.dead_model) == (K.DEAD, model)
    assert streamed(text) == found


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("INTERNAL", "cannot parse: Stub process 'm_0_0' is not healthy."),
        ("INTERNAL", BLS.replace("TritonModelException", "ValueError") + "Stub process 'm_0_0' is not healthy."),
        ("INVALID_ARGUMENT", "Stub process 'm_0_0' is not healthy."),
    ],
)
def test_a_model_that_quotes_its_caller_has_not_died(code, text):
    assert fault_of(code, text).kind is not K.DEAD


def test_a_servers_own_words_are_kept():
    assert fault_of("NOT_FOUND", "a\nb").reply == Reply(code="NOT_FOUND", text="a\nb")
    assert not fault_of("UNAVAILABLE", "Server is stopping").is_server


@pytest.mark.parametrize(
    ("code", "text", "kind", "is_server"),
    [
        ("UNAVAILABLE", "failed to connect to 1.2.3.4:1", K.UNAVAILABLE, True),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", K.TIMEOUT, False),
        ("INTERNAL", "RST_STREAM with error code 2", K.UNAVAILABLE, False),
        ("CANCELLED", "RST_STREAM with error code 8", K.UNAVAILABLE, False),
        ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max (5 vs. 4)", K.BROKEN, False),
    ],
)
def test_what_no_server_said_has_no_reply(code, text, kind, is_server):
    found = lost(code, text)
    assert (found.kind, found.reply, found.is_server) == (kind, None, is_server)


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("[request id: a] Exceeds maximum queue size", "UNAVAILABLE", K.OVERLOADED),
        ("Request for unknown model: 'x' is not found", "NOT_FOUND", K.UNKNOWN_MODEL),
        ("[request id: a] inference request batch-size must be <= 8 for 'm'", "INVALID_ARGUMENT", K.MISFIT),
        ("failed to get model version from specified version string 'a'", "INVALID_ARGUMENT", K.UNKNOWN_MODEL),
        ("whatever a model says", "INTERNAL", K.FAILED),
    ],
)
def test_errors_in_streams_have_their_codes_guessed(text, code, kind):
    found = streamed(text)
    assert (found.kind, found.reply) == (kind, Reply(code=code, text=text))


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
