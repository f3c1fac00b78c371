from pathlib import Path

import numpy as np
import pytest

from tests.kit import speech

from .conftest import Request

STREAMS = {
    "low voice": lambda: speech.vowels(chunks=90, pitch=110),
    "high voice": lambda: speech.vowels(chunks=90, pitch=190),
    "noise": lambda: speech.noise(chunks=90),
    "silence": lambda: speech.silence(chunks=90),
    "silence, then a voice": lambda: np.concatenate(
        [speech.silence(chunks=20), speech.vowels(chunks=40, pitch=110), speech.silence(chunks=30)]
    ),
}


@pytest.fixture
def model(load, repository: Path):
    folder = repository / "speech_activity"
    return load(folder / "1/model.py", folder)


def chunk(stream: int | str, audio: np.ndarray, *, start: bool = False, end: bool = False) -> Request:
    controls = {"START": start, "END": end}
    flags = {name: np.array([[int(value)]], np.int32) for name, value in controls.items()}
    return Request({"AUDIO": audio.reshape(1, -1), **flags}, sequence=stream)


def probability(response) -> float:
    array = response.array("SPEECH_PROBABILITY")
    assert array.shape == (1, 1)
    assert array.dtype == np.float32
    return array.item()


def listen(model, streams: dict[int | str, np.ndarray]) -> dict[int | str, np.ndarray]:
    """All streams from start to end, one chunk of each in every batch."""
    heard: dict[int | str, list[float]] = {name: [] for name in streams}
    for index in range(max(map(len, streams.values()))):
        batch = {
            name: chunk(name, chunks[index], start=index == 0, end=index == len(chunks) - 1)
            for name, chunks in streams.items()
            if index < len(chunks)
        }
        for name, response in zip(batch, model.execute(list(batch.values())), strict=True):
            heard[name].append(probability(response))
    return {name: np.array(values) for name, values in heard.items()}


@pytest.mark.parametrize("kind", STREAMS)
def test_probabilities_equal_the_reference(model, kind: str):
    chunks = STREAMS[kind]()
    np.testing.assert_allclose(listen(model, {7: chunks})[7], speech.reference(chunks), rtol=0, atol=1e-5)


def test_a_voice_is_told_from_noise_and_silence(model):
    heard = listen(model, {kind: STREAMS[kind]() for kind in STREAMS})
    assert np.median(heard["low voice"]) > 0.8
    assert np.median(heard["high voice"]) > 0.8
    assert heard["noise"].max() < 0.2
    assert heard["silence"].max() < 0.2


def test_streams_in_one_batch_get_what_each_gets_alone(model):
    streams = {kind: STREAMS[kind]()[: 90 - 7 * position] for position, kind in enumerate(STREAMS)}
    for kind, heard in listen(model, streams).items():
        np.testing.assert_allclose(heard, speech.reference(streams[kind]), rtol=0, atol=1e-5)


def test_start_begins_anew_without_an_end_before_it(model):
    voice = STREAMS["low voice"]()
    model.execute([chunk(7, voice[0], start=True)])
    for audio in voice[1:40]:
        model.execute([chunk(7, audio)])
    [again] = model.execute([chunk(7, voice[0], start=True)])
    [fresh] = model.execute([chunk(8, voice[0], start=True)])
    assert probability(again) == probability(fresh)


def test_an_ended_stream_is_forgotten(model):
    listen(model, {7: speech.noise(chunks=3), "eight": speech.noise(chunks=2)})
    assert model._streams == {}


def test_of_streams_that_never_end_the_longest_unheard_is_forgotten_first(load, repository: Path):
    folder = repository / "speech_activity"
    model = load(folder / "1/model.py", folder, MAX_STREAMS="3")
    audio = speech.noise(chunks=1)[0]
    for stream in (1, 2, 3):
        model.execute([chunk(stream, audio, start=True)])
    model.execute([chunk(1, audio)])
    model.execute([chunk(4, audio, start=True)])
    refused, *answers = model.execute([chunk(stream, audio) for stream in (2, 1, 3, 4)])
    assert refused.error.code == "INVALID_ARG"
    assert "begin a new one" in str(refused.error)
    assert [answer.error for answer in answers] == [None] * 3


def test_more_streams_are_remembered_than_the_scheduler_has_places_for(model, repository: Path):
    config = (repository / "speech_activity/config.pbtxt").read_text()
    assert "max_candidate_sequences: 256 " in config
    assert model._max_streams > 256


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_chunk_that_is_not_finite_is_refused_and_changes_no_stream(model, value: float):
    voice = STREAMS["low voice"]()[:30]
    broken = np.full(speech.CHUNK, value, np.float32)
    heard = []
    for index, audio in enumerate(voice):
        good, bad = model.execute([chunk(1, audio, start=index == 0), chunk(2, broken, start=index == 0)])
        assert bad.error.code == "INVALID_ARG"
        [retried] = model.execute([chunk(2, audio)])
        heard.append((probability(good), probability(retried)))
    for stream in np.transpose(heard):
        np.testing.assert_allclose(stream, speech.reference(voice), rtol=0, atol=1e-5)
