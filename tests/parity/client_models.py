"""The models that the clients are tried on, as (config.pbtxt, model.py), all of the Python backend."""

DATATYPES = (
    *("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    *("FP16", "BF16", "FP32", "FP64", "BYTES"),
)


def _tensors(kind: str, prefix: str, optional: str) -> str:
    types = {name: "STRING" if name == "BYTES" else name for name in DATATYPES}
    parts = [
        f'{{ name: "{prefix}_{name}" data_type: TYPE_{types[name]} dims: [ -1, -1 ]{optional} }}' for name in types
    ]
    return f"{kind} [ {', '.join(parts)} ]\n"


# Gives back what it gets: IN_<datatype> as OUT_<datatype>, for as many as the request brings.
IDENTITY = (
    'name: "identity"\nbackend: "python"\nmax_batch_size: 0\n'
    + _tensors("input", "IN", " optional: true")
    + _tensors("output", "OUT", ""),
    """
import torch
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([same(tensor) for tensor in request.inputs()]) for request in requests]

def same(tensor):
    name = tensor.name().replace("IN_", "OUT_")
    if name == "OUT_BF16":  # numpy has no such type
        return pb_utils.Tensor.from_dlpack(name, torch.from_dlpack(tensor.to_dlpack()).clone())
    return pb_utils.Tensor(name, tensor.as_numpy())
""",
)

# The sum of a sequence's numbers so far.
TOTAL = (
    """name: "total"
backend: "python"
max_batch_size: 4
input [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "TOTAL" data_type: TYPE_INT32 dims: [ 1 ] } ]
sequence_batching {
  direct { }
  max_sequence_idle_microseconds: 5000000
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] }
  ]
}
""",
    """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        number, start, ready = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0])
            for name in ("NUMBER", "START", "READY")
        )
        total = 0
        if ready:
            total = number if start else self.totals[request.correlation_id()] + number
            self.totals[request.correlation_id()] = total
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOTAL", np.array([[total]], np.int32))])
""",
)

# Counts up to COUNT, one response each; between them it sleeps PAUSE_MS, and stops when nobody listens any more.
# For COUNT -1 it says how many are counting now.
COUNTER = (
    """name: "counter"
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [
  { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "PAUSE_MS" data_type: TYPE_INT32 dims: [ 1 ] }
]
output [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] } ]
""",
    """
import threading
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.counting = set()

    def execute(self, requests):
        for request in requests:
            count, pause_ms = (
                int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]) for name in ("COUNT", "PAUSE_MS")
            )
            sender = request.get_response_sender()
            if count < 0:
                sender.send(number(len(self.counting)), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                threading.Thread(target=self.count_up, args=(sender, count, pause_ms)).start()

    def count_up(self, sender, count, pause_ms):
        self.counting.add(sender)
        for value in range(count):
            if sender.is_cancelled():
                break
            sender.send(number(value))
            time.sleep(pause_ms / 1000)
        self.counting.discard(sender)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

def number(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", np.array([value], np.int32))])
""",
)

# One at a time, as slow as the request says; what waits is never taken ahead.
SLOW = (
    """name: "slow"
backend: "python"
max_batch_size: 1
input [ { name: "X" data_type: TYPE_INT32 dims: [ 2 ] } ]
output [ { name: "INFO" data_type: TYPE_INT64 dims: [ 12 ] } ]
dynamic_batching { default_queue_policy { max_queue_size: 100 } }
""",
    None,  # the probe of the parity cases
)

MODELS = {"identity": IDENTITY, "total": TOTAL, "counter": COUNTER, "slow": SLOW}
