"""A model that gives back what it gets, of the Python backend: rows of so many floats as a caller likes, batched."""

from typing import Final

NAME: Final = "identity"
CONFIG: Final = """
name: "identity"
backend: "python"
max_batch_size: 64
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
dynamic_batching { }
"""
SOURCE: Final = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(one, "X").as_numpy())])
            for one in requests
        ]
"""
