"""Audio that sounds like someone speaking vowels, and what Silero VAD's own TorchScript says of audio.

The audio is made from formulas: the same samples everywhere, no recording.
"""

import functools
import warnings

import numpy as np
import torch

from triton_models.build import package_folder

RATE = 16000  # samples a second
CHUNK = 512
# The first three resonances of the vocal tract in Hz for a, i, u, ae, o (textbook averages), and their widths.
VOWELS = np.array([(730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410)])
WIDTHS = (80, 100, 140)
SYLLABLES_A_SECOND = 4


@functools.cache
def vowels(*, chunks: int, pitch: float, seed: int = 0) -> np.ndarray:
    """FP32 [chunks, 512] at 16 kHz: voiced syllables with a wandering pitch (Hz), gliding from vowel to vowel."""
    rng = np.random.default_rng(seed)
    time = np.arange(chunks * CHUNK) / RATE
    syllable, part = np.divmod(time * SYLLABLES_A_SECOND, 1)
    melody = pitch * (1 + 0.15 * np.sin(2 * np.pi * 1.3 * time) + 0.05 * np.sin(2 * np.pi * 5.1 * time))
    sound = np.diff(np.floor(np.cumsum(melody) / RATE), prepend=0) + 0.02 * rng.standard_normal(len(time))
    targets = VOWELS[rng.integers(0, len(VOWELS), int(syllable[-1]) + 2)]
    glide = np.clip((part - 0.7) / 0.3, 0, 1)[:, None]
    tracks = targets[syllable.astype(int)] * (1 - glide) + targets[syllable.astype(int) + 1] * glide
    for formant, width in enumerate(WIDTHS):
        sound = _resonance(sound, tracks[:, formant], width)
    sound *= np.clip(np.minimum(part / 0.15, (1 - part) / 0.25), 0, 1)
    return (0.5 * sound / np.abs(sound).max()).astype(np.float32).reshape(chunks, CHUNK)


def noise(*, chunks: int, seed: int = 0) -> np.ndarray:
    """White noise, FP32 [chunks, 512]."""
    return (0.1 * np.random.default_rng(seed).standard_normal((chunks, CHUNK))).astype(np.float32)


def silence(*, chunks: int) -> np.ndarray:
    """FP32 [chunks, 512]."""
    return np.zeros((chunks, CHUNK), np.float32)


def reference(chunks: np.ndarray) -> np.ndarray:
    """Probabilities FP32 [chunks] of one stream FP32 [chunks, 512], by the package's file, which keeps the state."""
    model = _silero()
    model.reset_states()
    # Not optimised: what it would gain is less than the time to specialise for so few chunks.
    with torch.inference_mode(), torch.jit.optimized_execution(False):
        return np.array([float(model(torch.from_numpy(chunk), RATE)) for chunk in chunks], np.float32)


@functools.cache
def _silero() -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch advises torch.export
        return torch.jit.load(package_folder("silero-vad", "silero_vad") / "data" / "silero_vad.jit")


def _resonance(sound: np.ndarray, frequencies: np.ndarray, width: float) -> np.ndarray:
    """A resonator of two poles (as in Klatt's synthesiser) whose frequency moves with time."""
    radius = np.exp(-np.pi * width / RATE)
    first = (2 * radius * np.cos(2 * np.pi * frequencies / RATE)).tolist()
    second = -radius * radius
    heard, last, before = [], 0.0, 0.0
    for sample, coefficient in zip(sound.tolist(), first, strict=True):
        gain = 1 - coefficient - second
        last, before = gain * sample + coefficient * last + second * before, last
        heard.append(last)
    return np.array(heard)
