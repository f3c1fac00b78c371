"""Contracts of `image-embedding`, `ocr`, `speech-activity` and `text-classification`: in, out, and what is refused."""

import base64

import jsonschema
import numpy as np
import pytest

from gateway.core.errors import BackendError, FaultKind, InvalidInput
from gateway.core.tensors import from_numpy, to_numpy
from gateway.core.types import Message, Tensors, Usage
from gateway.tasks import CONTRACTS
from gateway.tasks.image_embedding import ImageEmbedding
from gateway.tasks.ocr import Ocr
from gateway.tasks.speech_activity import SpeechActivity
from gateway.tasks.text_classification import TEMPERATURE, TextClassification

IMAGE = ImageEmbedding(dimensions=2, max_image_bytes=10)
OCR = Ocr(max_image_bytes=10)
SPEECH = SpeechActivity()
LABELS = TextClassification(dimensions=2, max_labels=3, max_characters=20, max_label_characters=8, max_tokens=8)
CHUNK = np.arange(-256, 256, dtype="<i2") * 128


def tensors(**outputs) -> Tensors:
    return Tensors(outputs=tuple(from_numpy(name, np.asarray(array)) for name, array in outputs.items()), version="1")


def tensors_with(outputs, **others) -> Tensors:
    return tensors(**{**outputs, **others})


@pytest.mark.parametrize("contract", [IMAGE, OCR, SPEECH, LABELS], ids=lambda c: c.name)
def test_schemas_are_schemas(contract):
    jsonschema.Draft202012Validator.check_schema(contract.input_schema)
    jsonschema.Draft202012Validator.check_schema(contract.output_schema)


def test_of_all_tasks_only_speech_belongs_to_sequences():
    assert [name for name, contract in CONTRACTS.items() if contract.is_sequence] == ["speech-activity"]


# --- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("contract", "shape"), [(IMAGE, (1, 1)), (OCR, (1,))], ids=["embedding", "ocr"])
def test_an_image_goes_out_as_its_own_bytes(contract, shape):
    parsed = contract.parse({"image": base64.b64encode(b"\0file").decode()}, {})
    (tensor,) = contract.payload(parsed).inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("IMAGE", "BYTES", shape)
    assert to_numpy(tensor).reshape(-1).tolist() == [b"\0file"]
    assert parsed == contract.parse({"image": b"\0file"}, {})


@pytest.mark.parametrize("contract", [IMAGE, OCR], ids=["embedding", "ocr"])
@pytest.mark.parametrize(
    ("given", "parameters", "field"),
    [
        ({}, {}, "input.image"),
        ({"image": 5}, {}, "input.image"),
        ({"image": "no base64!"}, {}, "input.image"),
        ({"image": b""}, {}, "input.image"),
        ({"image": b"x" * 11}, {}, "input.image"),
        ({"image": b"x", "top_k": 1}, {}, "input.top_k"),
        ({"image": b"x"}, {"size": 1}, "parameters.size"),
        (5, {}, "input"),
    ],
)
def test_an_image_that_is_none_is_refused_by_its_field(contract, given, parameters, field):
    with pytest.raises(InvalidInput) as refused:
        contract.parse(given, parameters)
    assert refused.value.field == field


def test_an_image_embedding_comes_back_with_its_dimensions():
    answer = IMAGE.answer(tensors(EMBEDDING=np.array([[0.6, 0.8]], np.float32)), b"x")
    jsonschema.validate({**answer.output, "embedding": answer.output["embedding"].tolist()}, IMAGE.output_schema)


@pytest.mark.parametrize("vector", [[[1, 1]], [[np.nan, 0]], [[1, 0], [1, 0]], [[1, 0, 0]]])
def test_an_image_embedding_that_is_none_is_the_backends_fault(vector):
    with pytest.raises(BackendError) as broken:
        IMAGE.answer(tensors(EMBEDDING=np.array(vector, np.float32)), b"x")
    assert broken.value.fault.kind is FaultKind.BROKEN


# --- ocr ------------------------------------------------------------------------------------------

FOUND = {
    "TEXT": np.array([b"Apples", "3 €".encode(), b"Bread"], object),
    "SCORE": np.array([0.9, 0.8, 1.0], np.float32),
    "BOX": np.zeros((3, 4, 2), np.float32),
    "ROW": np.array([0, 0, 1], np.int32),
}


def test_lines_are_joined_by_rows():
    answer = OCR.answer(tensors(**FOUND), b"x")
    jsonschema.validate(answer.output, OCR.output_schema)
    assert answer.output["text"] == "Apples 3 €\nBread"
    assert answer.output["lines"][1] == {"text": "3 €", "score": pytest.approx(0.8), "box": [[0.0, 0.0]] * 4}


def test_an_image_without_text_has_no_lines():
    none = {name: array[:0] for name, array in FOUND.items()}
    assert OCR.answer(tensors(**none), b"x").output == {"text": "", "lines": []}


@pytest.mark.parametrize(
    "change",
    [
        {"SCORE": np.array([0.9, 0.8], np.float32)},
        {"SCORE": np.array([0.9, 0.8, 1.5], np.float32)},
        {"SCORE": np.array([0.9, 0.8, np.nan], np.float32)},
        {"BOX": np.full((3, 4, 2), np.inf, np.float32)},
        {"ROW": np.array([0, 1, 0], np.int32)},
        {"TEXT": np.array([b"\xff", b"", b""], object)},
    ],
    ids=["count", "score", "nan", "box", "order", "UTF-8"],
)
def test_lines_that_are_none_are_the_backends_fault(change):
    with pytest.raises(BackendError) as broken:
        OCR.answer(tensors_with(FOUND, **change), b"x")
    assert broken.value.fault.kind is FaultKind.BROKEN


# --- speech -----------------------------------------------------------------------------------------


def test_audio_is_the_same_as_text_and_as_bytes():
    raw = CHUNK.tobytes()
    for given in (raw, base64.b64encode(raw).decode()):
        (tensor,) = SPEECH.payload(SPEECH.parse({"audio": given}, {})).inputs
        assert (tensor.name, tensor.datatype, tensor.shape) == ("AUDIO", "FP32", (1, 512))
        np.testing.assert_array_equal(to_numpy(tensor)[0], CHUNK / 32768)


@pytest.mark.parametrize("audio", [b"", b"x" * 1023, b"x" * 1025, "!", None, [0.1] * 512])
def test_audio_of_another_length_or_form_is_refused(audio):
    with pytest.raises(InvalidInput) as refused:
        SPEECH.parse({"audio": audio}, {})
    assert refused.value.field == "input.audio"


def test_a_probability_comes_back():
    answer = SPEECH.answer(tensors(SPEECH_PROBABILITY=np.array([[0.25]], np.float32)), CHUNK)
    jsonschema.validate(answer.output, SPEECH.output_schema)
    assert answer.output == {"speech_probability": 0.25}


@pytest.mark.parametrize("value", [-0.1, 1.1, np.nan])
def test_a_probability_that_is_none_is_the_backends_fault(value):
    with pytest.raises(BackendError):
        SPEECH.answer(tensors(SPEECH_PROBABILITY=np.array([[value]], np.float32)), CHUNK)


# --- labels -----------------------------------------------------------------------------------------


def labelled(vectors, tokens=(3, 1, 1)) -> Tensors:
    return tensors(EMBEDDING=np.array(vectors, np.float32), TOKENS=np.array(tokens, np.int32)[:, None])


def test_the_text_and_its_labels_go_out_as_one_request():
    parsed = LABELS.parse({"text": "数é", "labels": ["a", "b c"]}, {})
    (tensor,) = LABELS.payload(parsed).inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("TEXT", "BYTES", (3, 1))
    assert [row.decode() for row in to_numpy(tensor)[:, 0]] == ["数é", "a", "b c"]


def test_scores_are_a_softmax_of_cosines():
    parsed = LABELS.parse({"text": "t", "labels": ["far", "near"]}, {})
    answer = LABELS.answer(labelled([[1, 0], [0.28, 0.96], [0.352, 0.936]]), parsed)
    jsonschema.validate(answer.output, LABELS.output_schema)
    weights = np.exp([0, (0.352 - 0.28) / TEMPERATURE])
    assert answer.output["label"] == "near"
    assert answer.output["scores"] == pytest.approx(list(weights / weights.sum()), rel=1e-4)
    assert answer.usage == Usage(input_tokens=5)


def test_of_equal_labels_the_first_is_taken():
    parsed = LABELS.parse({"text": "t", "labels": ["one", "two"]}, {})
    assert LABELS.answer(labelled([[1, 0], [0, 1], [0, 1]]), parsed).output == {"label": "one", "scores": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"labels": ["a", "b"]}, "input.text"),
        ({"text": " ", "labels": ["a", "b"]}, "input.text"),
        ({"text": "x" * 21, "labels": ["a", "b"]}, "input.text"),
        ({"text": "t"}, "input.labels"),
        ({"text": "t", "labels": "a, b"}, "input.labels"),
        ({"text": "t", "labels": ["a"]}, "input.labels"),
        ({"text": "t", "labels": ["a", "b", "c", "d"]}, "input.labels"),
        ({"text": "t", "labels": ["a", 1]}, "input.labels[1]"),
        ({"text": "t", "labels": ["a", ""]}, "input.labels[1]"),
        ({"text": "t", "labels": ["a", "b", "a"]}, "input.labels[2]"),
        ({"text": "t", "labels": ["a", "x" * 9]}, "input.labels[1]"),
        ({"text": ["t"], "labels": ["a", "b"]}, "input.text"),
    ],
)
def test_a_text_or_label_that_is_none_is_refused_by_its_field(given, field):
    with pytest.raises(InvalidInput) as refused:
        LABELS.parse(given, {})
    assert refused.value.field == field


@pytest.mark.parametrize(("tokens", "field"), [((9, 1, 1), "input.text"), ((1, 1, 9), "input.labels[1]")])
def test_more_tokens_than_the_model_reads_are_refused(tokens, field):
    parsed = LABELS.parse({"text": "t", "labels": ["a", "b"]}, {})
    with pytest.raises(InvalidInput, match="9 tokens and the model reads 8") as refused:
        LABELS.answer(labelled([[1, 0]] * 3, tokens), parsed)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "event",
    [labelled([[1, 0]] * 2, (1, 1)), labelled([[1, 1]] * 3), Message(body=b"{}")],
    ids=["rows", "length", "message"],
)
def test_vectors_that_are_none_are_the_backends_fault(event):
    with pytest.raises(BackendError) as broken:
        LABELS.answer(event, LABELS.parse({"text": "t", "labels": ["a", "b"]}, {}))
    assert broken.value.fault.kind is FaultKind.BROKEN
