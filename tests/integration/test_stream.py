"""A stream of speech through `gateway serve`, from a WebSocket to the model and back."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.kit import speech
from tests.kit.serving import KEY, serving

REPOSITORY = Path(__file__).parents[2] / "triton_models"
SECTIONS = {
    "backends": {"local": {"kind": "local", "repository": str(REPOSITORY), "models": ["speech_activity"]}},
    "tasks": {"speech-activity": {"contract": "speech-activity"}},
    "rules": [{"name": "speech", "split": [{"backend": "local", "model": "speech_activity"}]}],
}


def opened(gateway):
    url = gateway.url.replace("http://", "ws://") + "/v1/tasks/speech-activity/stream"
    return connect(url, additional_headers={"authorization": f"Bearer {KEY}"}, proxy=None)


async def test_speech_is_heard_chunk_by_chunk_and_a_stop_ends_the_stream_in_order(tmp_path):
    audio = np.concatenate([speech.silence(chunks=10), speech.vowels(chunks=40, pitch=140)])
    samples = np.round(audio * 32767).astype("<i2")
    async with serving(tmp_path, "", **SECTIONS) as gateway, opened(gateway) as ws:
        for chunk in samples:
            await ws.send(chunk.tobytes())
        async with asyncio.timeout(30):
            answers = [json.loads(await ws.recv()) for _ in samples]
        heard = [answer["output"]["speech_probability"] for answer in answers]
        assert np.allclose(heard, speech.reference(samples.astype(np.float32) / 32768), atol=1e-3)
        gateway.process.terminate()
        async with asyncio.timeout(20):
            assert json.loads(await ws.recv()) == {"type": "going_away"}
            with pytest.raises(ConnectionClosed):
                await ws.recv()
            assert ws.close_code == 1001
            assert await gateway.process.wait() == 0
    assert "Traceback" not in gateway.log.read_text()
    assert KEY not in gateway.log.read_text()
