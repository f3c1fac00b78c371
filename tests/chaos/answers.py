"""What is asked, and the one right answer to it."""

import hashlib
from typing import Final

WORDS: Final = 8
PROMPT_TOKENS: Final = 1
"""What the LLM server says it has read: less than the gateway reserves, so that no answer is owed for afterwards."""


def words_of(prompt: str) -> list[str]:
    """What the LLM server says to a prompt; each word is a token."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return [digest[4 * number : 4 * number + 4] for number in range(WORDS)]


def text_of(prompt: str) -> str:
    """The whole of it."""
    return " ".join(words_of(prompt))


def doubled(numbers: list[int]) -> list[int]:
    """What the model `doubled` says."""
    return [2 * number + 1 for number in numbers]


DOUBLED: Final = (
    """name: "doubled"
backend: "python"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 1000 }
input [ { name: "X" data_type: TYPE_INT32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 4 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
""",
    """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", 2 * pb_utils.get_input_tensor_by_name(one, "X").as_numpy() + 1)]
            )
            for one in requests
        ]
""",
)
