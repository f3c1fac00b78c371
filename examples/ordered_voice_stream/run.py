"""Audio in chunks over a WebSocket: how likely somebody speaks in each of them, in their order.

    GATEWAY_KEY=... python examples/ordered_voice_stream/run.py [mono-16-kHz.wav]

The model keeps its state from chunk to chunk, so all chunks of one stream go to the same server, one after the other.
Without a file it plays a second of silence, two seconds of a made-up voice, and a second of silence.

Prints (a row for a quarter of a second):

    0.00 s  ...
    ...
    125 chunks, answered in their order; speech from ... s to ... s
"""

import asyncio
import json
import os
import sys
import wave

import numpy as np
from websockets.asyncio.client import connect

URL, KEY = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080"), os.environ.get("GATEWAY_KEY")
if not KEY:
    print("set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)", file=sys.stderr)
    sys.exit(2)
RATE, SAMPLES = 16_000, 512  # a chunk is 32 ms


def made_up() -> np.ndarray:
    """INT16 samples: silence, a buzz with the resonances of vowels, silence."""
    time = np.arange(2 * RATE) / RATE
    pulses = np.diff(np.floor(np.cumsum(120 + 20 * np.sin(2 * np.pi * 1.3 * time)) / RATE), prepend=0)
    voice = np.zeros_like(pulses)
    for formant, width in ((730, 80), (1090, 100), (2440, 140)):  # those of "a", in Hz
        ring = np.exp(-np.pi * width * time[:800]) * np.sin(2 * np.pi * formant * time[:800])
        voice += np.convolve(pulses, ring)[: len(time)]
    voice *= np.clip(np.sin(2 * np.pi * 2 * time) + 0.6, 0, 1)  # syllables, four a second
    silence = np.zeros(RATE)
    return (np.concatenate([silence, voice / np.abs(voice).max(), silence]) * 16_000).astype("<i2")


def recorded(path: str) -> np.ndarray:
    """INT16 samples of a file."""
    with wave.open(path) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            sys.exit(f"{path}: must be mono, 16 kHz, 16 bits")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


async def main() -> None:
    """Send the chunks as they would come, and read the answers meanwhile."""
    audio = recorded(sys.argv[1]) if len(sys.argv) > 1 else made_up()
    chunks = [audio[at : at + SAMPLES] for at in range(0, len(audio) - SAMPLES + 1, SAMPLES)]
    url = URL.replace("http", "ws", 1) + "/v1/tasks/speech-activity/stream"
    async with connect(url, additional_headers={"authorization": f"Bearer {KEY}"}) as socket:

        async def send() -> None:
            for chunk in chunks:
                await socket.send(chunk.tobytes())
            await socket.send(json.dumps({"type": "end"}))  # answer what was sent, then close

        sending = asyncio.create_task(send())
        answers = [json.loads(message) async for message in socket]
        await sending
    if any("error" in answer for answer in answers):
        sys.exit(next(answer["error"]["detail"] for answer in answers if "error" in answer))
    assert [answer["number"] for answer in answers] == list(range(1, len(chunks) + 1))
    speech = [answer["output"]["speech_probability"] for answer in answers]
    for at in range(0, len(speech), 8):
        likely = max(speech[at : at + 8])
        print(f"{at * SAMPLES / RATE:.2f} s  {'#' * round(30 * likely)}")
    spoken = [at * SAMPLES / RATE for at, likely in enumerate(speech) if likely > 0.5]
    heard = f"speech from {spoken[0]:.1f} s to {spoken[-1]:.1f} s" if spoken else "no speech"
    print(f"{len(speech)} chunks, answered in their order; {heard}")


asyncio.run(main())
