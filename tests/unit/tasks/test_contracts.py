"""The contracts' two-way forms: what a backend is asked, and which of its answers are taken."""

import base64

import jsonschema
import numpy as np
import pytest

from gateway.core.errors import BackendError, Fault, FaultKind, InvalidInput
from gateway.core.tensors import from_numpy, to_numpy
from gateway.core.types import Delta, Message, Tensors, Usage
from gateway.tasks import CONTRACTS
from gateway.tasks.chat import Chat, parse_chat
from gateway.tasks.contract import located
from gateway.tasks.image_classification import ImageClassification
from gateway.tasks.tensor import TensorTask
from gateway.tasks.text_embedding import TextEmbedding

EMBED = TextEmbedding(dimensions=2, max_texts=3, max_characters=20, max_tokens=8)
IMAGE = ImageClassification(labels=["cat", "dog", "sofa"], max_image_bytes=10)


def tensors(**outputs) -> Tensors:
    return Tensors(outputs=tuple(from_numpy(name, array) for name, array in outputs.items()), version="1")


def test_every_contract_is_known_by_its_own_name():
    assert {name: contract.name for name, contract in CONTRACTS.items()} == {name: name for name in CONTRACTS}


@pytest.mark.parametrize("contract", [EMBED, IMAGE, Chat(), TensorTask()], ids=lambda c: c.name)
def test_schemas_are_schemas(contract):
    jsonschema.Draft202012Validator.check_schema(contract.input_schema)
    jsonschema.Draft202012Validator.check_schema(contract.output_schema)


@pytest.mark.parametrize("text", ["数🙂é", "a\u0000b", "x" * 20])
def test_a_text_goes_out_as_utf8_bytes_in_a_column(text):
    payload = EMBED.payload(EMBED.parse({"text": [text, "b"]}, {}))
    (tensor,) = payload.inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("TEXT", "BYTES", (2, 1))
    assert to_numpy(tensor)[0, 0].decode() == text


def embedded(rows, tokens) -> Tensors:
    return tensors(EMBEDDING=np.array(rows, np.float32), TOKENS=np.array(tokens, np.int32).reshape(-1, 1))


def test_an_embedding_comes_back_with_its_tokens():
    parsed = EMBED.parse({"text": ["a", "b"]}, {})
    answer = EMBED.answer(embedded([[1, 0], [0.6, 0.8]], [3, 8]), parsed)
    jsonschema.validate({**answer.output, "embeddings": answer.output["embeddings"].tolist()}, EMBED.output_schema)
    assert answer.usage == Usage(input_tokens=11)


@pytest.mark.parametrize(("truncate", "counted"), [(True, 8), (False, None)])
def test_more_tokens_than_the_model_reads(truncate, counted):
    parsed = EMBED.parse({"text": "a"}, {"truncate": truncate})
    if counted is None:
        with pytest.raises(InvalidInput, match="9 tokens") as refused:
            EMBED.answer(embedded([[1, 0]], [9]), parsed)
        assert refused.value.field == "input.text"
    else:
        assert EMBED.answer(embedded([[1, 0]], [9]), parsed).usage == Usage(input_tokens=counted)


@pytest.mark.parametrize(
    "event",
    [
        embedded([[1, 0], [1, 0]], [1, 1]),
        embedded([[1, 1]], [1]),
        embedded([[np.nan, 0]], [1]),
        tensors(EMBEDDING=np.array([[1, 0]], np.float32)),
        tensors(EMBEDDING=np.array([[1, 0]], np.float64), TOKENS=np.array([[1]], np.int32)),
        Message(body=b"{}"),
        Delta(data=b"{}"),
    ],
    ids=["rows", "length", "nan", "missing", "datatype", "message", "delta"],
)
def test_an_answer_that_is_not_the_contracts_is_the_backends_fault(event):
    with pytest.raises(BackendError) as broken:
        EMBED.answer(event, EMBED.parse({"text": "a"}, {}))
    assert broken.value.fault.kind is FaultKind.BROKEN


def test_ties_among_labels_keep_their_order_and_the_best_come_first():
    parsed = IMAGE.parse({"image": b"x", "top_k": 2}, {})
    answer = IMAGE.answer(tensors(SCORES=np.array([[0.25, 0.5, 0.25]], np.float32)), parsed)
    jsonschema.validate(answer.output, IMAGE.output_schema)
    assert [(label["name"], label["index"]) for label in answer.output["labels"]] == [("dog", 1), ("cat", 0)]


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,", "data:;base64,"])
def test_an_image_is_the_same_in_every_spelling(prefix):
    parsed = IMAGE.parse({"image": prefix + base64.b64encode(b"file").decode()}, {})
    assert to_numpy(IMAGE.payload(parsed).inputs[0])[0, 0] == b"file"
    assert parsed == IMAGE.parse({"image": b"file"}, {})


def test_an_image_over_its_bound_is_named():
    with pytest.raises(InvalidInput, match="11 bytes, at most 10") as refused:
        IMAGE.parse({"image": b"x" * 11}, {})
    assert refused.value.field == "input.image"


@pytest.mark.parametrize("labels", [["one"], ["one", "two"]])
def test_top_k_by_default_fits_few_labels(labels):
    assert ImageClassification(labels=labels).parse({"image": b"x"}, {}).top_k == len(labels)


def test_a_chat_passes_what_it_does_not_know():
    body = {"messages": [{"role": "user", "content": "hi", "x": 1}], "stream": True, "unheard_of": {"y": [1]}}
    payload = Chat().payload(parse_chat(body))
    assert (payload.body, payload.stream) == (body, True)


@pytest.mark.parametrize("message", [b"5", b'{"x":' + b"[" * 400 + b"]" * 400 + b"}"])
def test_a_chat_answer_that_cannot_be_told_in_task_form_is_broken(message):
    parsed = Chat().parse({"messages": [{"role": "user", "content": "x"}]}, {})
    with pytest.raises(BackendError) as caught:
        Chat().answer(Message(body=b'{"choices":[{"message":' + message + b"}]}"), parsed)
    assert caught.value.fault.kind is FaultKind.BROKEN


def test_the_task_form_of_a_chat_takes_messages_and_parameters():
    messages = [{"role": "user", "content": "hi"}]
    parsed = Chat().parse({"messages": messages}, {"max_tokens": 5})
    assert Chat().payload(parsed).body == {"messages": messages, "max_tokens": 5}
    whole = Message(body=b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}')
    assert Chat().answer(whole, parsed).output == {"message": {"content": "hi"}, "finish_reason": "stop"}
    for wrong in ({"messages": messages, "stream": True}, {"messages": messages, "model": "x"}):
        with pytest.raises(InvalidInput):
            Chat().parse(wrong, {})


@pytest.mark.parametrize(
    ("message", "field", "told"),
    [
        ("IMAGE: not a decodable image", "input.image", "not a decodable image"),
        ("something else", "input.image", "something else"),
        ("TEXT: odd", "input.image", "TEXT: odd"),
    ],
)
def test_a_refusal_names_the_callers_field(message, field, told):
    found = located(Fault(kind=FaultKind.REFUSED_INPUT, message=message), IMAGE.tensor_fields)
    assert (found.field, found.message) == (field, told)


def test_other_faults_and_named_fields_stay_as_they_are():
    for fault in (
        Fault(kind=FaultKind.BROKEN, message="IMAGE: x"),
        Fault(kind=FaultKind.REFUSED_INPUT, message="IMAGE: x", field="messages"),
    ):
        assert located(fault, IMAGE.tensor_fields) is fault
