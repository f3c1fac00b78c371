"""`speech_activity` on both servers: streams that take turns get what each gets alone."""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc as client
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from tests.kit import speech
from tests.kit.servers import TARGETS, Server, copy_model
from triton_models import build

MODEL = "speech_activity"
STREAMS = {
    101: speech.vowels(chunks=90, pitch=110),
    102: np.concatenate([speech.noise(chunks=20), speech.vowels(chunks=50, pitch=190), speech.silence(chunks=20)]),
}


@contextmanager
def loaded(server: Server) -> Iterator[None]:
    with client.InferenceServerClient(server.grpc) as asked:
        asked.load_model(MODEL)
        yield
        asked.unload_model(MODEL)


@pytest.fixture(scope="module", params=TARGETS)
def server(request: pytest.FixtureRequest, serving: Callable[[str], Server]) -> Iterator[Server]:
    """A server with the model loaded."""
    assert build.main([]) == 0
    shutil.rmtree(build.REPOSITORY / "__pycache__", ignore_errors=True)  # Triton would take it for a model
    running = serving(request.param)
    copy_model(running, build.REPOSITORY / MODEL)
    with loaded(running):
        yield running


async def listen(asked: aio.InferenceServerClient, stream: int, chunks: np.ndarray, turns: Any) -> np.ndarray:
    """One stream from start to end, each chunk when `turns()` has come."""
    heard = []
    for index, chunk in enumerate(chunks):
        await turns()
        audio = client.InferInput("AUDIO", [1, speech.CHUNK], "FP32")
        audio.set_data_from_numpy(chunk[None])
        place = {"sequence_start": index == 0, "sequence_end": index == len(chunks) - 1}
        result = await asked.infer(MODEL, [audio], sequence_id=stream, client_timeout=20, **place)
        heard.append(result.as_numpy("SPEECH_PROBABILITY").item())
    return np.array(heard)


async def together(server: Server, streams: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """All streams at once, chunk by chunk."""
    barrier = asyncio.Barrier(len(streams))
    async with aio.InferenceServerClient(server.grpc) as asked:
        calls = [listen(asked, stream, chunks, barrier.wait) for stream, chunks in streams.items()]
        return dict(zip(streams, await asyncio.gather(*calls), strict=True))


async def test_interleaved_streams_get_what_each_gets_alone(server: Server):
    interleaved = await together(server, STREAMS)
    for stream, chunks in STREAMS.items():
        alone = (await together(server, {stream: chunks}))[stream]
        np.testing.assert_allclose(interleaved[stream], alone, rtol=0, atol=1e-5)
        np.testing.assert_allclose(alone, speech.reference(chunks), rtol=0, atol=1e-5)
        assert np.ptp(alone) > 0.8, "a stream that says the same all the time proves nothing"


async def test_many_streams_at_once_each_get_their_own(server: Server):
    names = {1000 + number: 101 + number % 2 for number in range(24)}
    heard = await together(server, {stream: STREAMS[kind][:30] for stream, kind in names.items()})
    expected = {kind: speech.reference(chunks[:30]) for kind, chunks in STREAMS.items()}
    for stream, kind in names.items():
        np.testing.assert_allclose(heard[stream], expected[kind], rtol=0, atol=1e-5)


async def test_an_ended_stream_has_to_begin_anew(server: Server):
    chunks = STREAMS[101][:2]
    await together(server, {7: chunks})
    audio = client.InferInput("AUDIO", [1, speech.CHUNK], "FP32")
    audio.set_data_from_numpy(chunks[:1])
    async with aio.InferenceServerClient(server.grpc) as asked:
        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            await asked.infer(MODEL, [audio], sequence_id=7, client_timeout=20)
