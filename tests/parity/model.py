"""The probe: a Python model that sleeps as long as its requests ask, and tells each how it was run.

X INT32 [rows, width >= 2]: a request's id, milliseconds to sleep, then anything. A batch sleeps its longest wish.
INFO INT64 [rows, 12], all rows alike: executions so far, requests and rows of the batch, place in it, instance,
version, null requests of the sequence batcher in it, start in microseconds, and the controls START, READY, END and
CORRID (-1 where the model has none).
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils

CONTROLS = ("START", "READY", "END", "CORRID")


class TritonPythonModel:
    def initialize(self, args):
        self.executions = 0
        self.instance = int(args["model_instance_name"].split("_")[-1])
        self.version = int(args["model_version"])

    def execute(self, requests):
        start_us = time.time_ns() // 1000
        self.executions += 1
        wishes = [array(request, "X") for request in requests]
        controls = [[control(request, name) for name in CONTROLS] for request in requests]
        # A null request has READY 0, and garbage for the rest.
        real = [wish for wish, (_, ready, _, _) in zip(wishes, controls, strict=True) if ready != 0]
        time.sleep(max((int(wish[0, 1]) for wish in real), default=0) / 1000)
        rows = sum(len(wish) for wish in real)
        answers = []
        for place, (wish, seen) in enumerate(zip(wishes, controls, strict=True)):
            nulls = len(requests) - len(real)
            batch = [self.executions, len(real), rows, place, self.instance, self.version, nulls, start_us]
            info = np.array([batch + seen] * len(wish), np.int64)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("INFO", info)]))
        return answers


def array(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def control(request, name):
    values = array(request, name)
    return -1 if values is None else int(values.reshape(-1)[0].astype(np.int64))
