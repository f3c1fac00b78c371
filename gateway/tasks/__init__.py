"""Task contracts: one file each. A contract says what goes in, what comes out, and how a backend is asked.

Pure: a contract parses a caller's input, turns it into the payload of a backend kind, and turns the backend's
answer into the task's output, refusing one that does not fit: a wrong answer is a 502, never a wrong 200.
"""

from collections.abc import Callable, Mapping

from gateway.core.types import Speech
from gateway.tasks.chat import Chat
from gateway.tasks.contract import Contract
from gateway.tasks.image_classification import ImageClassification
from gateway.tasks.image_embedding import ImageEmbedding
from gateway.tasks.ocr import Ocr
from gateway.tasks.speech_activity import SpeechActivity
from gateway.tasks.tensor import TensorTask
from gateway.tasks.text_classification import TextClassification
from gateway.tasks.text_embedding import TextEmbedding

_ALL = (
    TextEmbedding,
    TextClassification,
    ImageClassification,
    ImageEmbedding,
    Ocr,
    SpeechActivity,
    Chat,
    TensorTask,
)
CONTRACTS: Mapping[str, Callable[..., Contract]] = {contract.name: contract for contract in _ALL}
"""Every contract by its name in the configuration; the values build one from a task's options."""
SPEAKS: Mapping[str, frozenset[Speech]] = {contract.name: contract.speaks for contract in _ALL}
"""The kinds of backends that can answer each."""
