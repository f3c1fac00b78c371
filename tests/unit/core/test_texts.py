import pytest

from gateway.core import texts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "[request id: <id_unknown>] inference request batch-size must be <= 4 for 'std'",
            "inference request batch-size must be <= 4 for the model",
        ),
        (
            "[request id: a-1] inference input 'X' data-type is 'FP32', but model 'std' expects 'INT32'",
            "inference input 'X' data-type is 'FP32', but the model expects 'INT32'",
        ),
        (
            "[request id: r] unexpected shape for input 'X' for model 'std'. Expected [-1,2], got [1,3]. NOTE: Set ...",
            "unexpected shape for input 'X' for the model. Expected [-1,2], got [1,3].",
        ),
        ("in ensemble 'ens', pre: negative", "pre: negative"),
        (
            "in ensemble 'a', in ensemble 'b', [request id: 1] unexpected inference input 'Q' for model 'm'",
            "unexpected inference input 'Q' for the model",
        ),
        ("two\nlines\tand \x1b[31m colour", "two lines and [31m colour"),
        ("", texts.GENERIC_REFUSAL),
        (
            "Failed to process the request(s) for model 'bad_0_0', message: ValueError: plain\n\nAt:\n  /x/model.py(9)",
            texts.GENERIC_REFUSAL,
        ),
        ("KeyError: 'labels'", texts.GENERIC_REFUSAL),
        ("numpy.exceptions.AxisError: axis 3", texts.GENERIC_REFUSAL),
        ('Traceback (most recent call last):\n  File "x", line 1', texts.GENERIC_REFUSAL),
    ],
)
def test_what_a_caller_sees_of_tritons_texts(text, shown):
    assert texts.triton_shown(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max_tokens must be positive", "max_tokens must be positive"),
        ("see http://10.0.0.7:8000/v1/x for more", "see (address removed) for more"),
        ("Incorrect API key provided: sk-proj-abcdef123456.", "Incorrect API key provided: ***."),
        ("header Bearer abc.def", "header ***"),
    ],
)
def test_addresses_and_keys_go(text, shown):
    assert texts.shown(text) == shown


def test_texts_are_bounded():
    assert len(texts.shown("x" * 1_000_000)) == texts.MAX_TEXT
    assert texts.logged("a\nb sk-123456789") == "a b ***"


@pytest.mark.parametrize(
    ("value", "code"), [("rate_limit", "rate_limit"), (400, None), (None, None), ("a b", None), ("x" * 65, None)]
)
def test_codes(value, code):
    assert texts.code(value) == code


@pytest.mark.parametrize(
    ("value", "field"), [("messages[0].role", "messages[0].role"), ("a\r\nb", None), (3, None), (None, None)]
)
def test_fields(value, field):
    assert texts.field(value) == field


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[request id: a] unexpected shape for input 'X'", "[request id: a] unexpected shape for input 'X'"),
        ("Expected [-1,2], got [1/3] or a/b/c", "Expected [-1,2], got [1/3] or a/b/c"),
        ("failed to open /srv/models/m/1/x.bin: no", "failed to open (path removed): no"),
        ("message: ValueError: x\n\nAt:\n  /srv/model.py(10): execute\n", texts.GENERIC_FAILURE),
        ("", texts.GENERIC_FAILURE),
        ("unexpected inference input 'key_states'", "unexpected inference input 'key_states'"),
        ("denied for sk-abcdefgh at grpc://10.0.0.1:8001/x", "denied for *** at (address removed)"),
    ],
)
def test_a_model_servers_words_are_told_without_what_is_inside(text, told):
    assert texts.replied(text) == told


def test_a_model_servers_words_are_bounded():
    assert len(texts.replied("x" * 100_000)) == texts.MAX_REPLY
