"""Triton's own client on the gateway: all it needs besides is the key.

    GATEWAY_KEY=... python examples/tritonclient_http.py

Prints:

    text_embedding takes TEXT, gives EMBEDDING, TOKENS
    2 vectors of 384 numbers, of length 1.00 and 1.00
    text_embedding has answered ... requests
    refused: 404 Request for unknown model: 'nope' is not found
"""

import os
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

url, key = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080"), os.environ.get("GATEWAY_KEY")
if not key:
    print("set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)", file=sys.stderr)
    sys.exit(2)


class Bearer(triton.InferenceServerClientPlugin):
    """Adds the key to each request."""

    def __call__(self, request):
        request.headers["authorization"] = f"Bearer {key}"


client = triton.InferenceServerClient(url.removeprefix("http://"))
client.register_plugin(Bearer())

model = client.get_model_metadata("text_embedding")
names = {kind: ", ".join(sorted(one["name"] for one in model[kind])) for kind in ("inputs", "outputs")}
print(f"text_embedding takes {names['inputs']}, gives {names['outputs']}")

text = triton.InferInput("TEXT", [2, 1], "BYTES")
text.set_data_from_numpy(np.array([[b"a man is playing a guitar"], [b"someone plays an instrument"]], object))
vectors = client.infer("text_embedding", [text]).as_numpy("EMBEDDING")
lengths = " and ".join(f"{length:.2f}" for length in np.linalg.norm(vectors, axis=1))
print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers, of length {lengths}")

[counts] = client.get_inference_statistics("text_embedding")["model_stats"]
print("text_embedding has answered", counts["inference_stats"]["success"]["count"], "requests")

try:
    client.infer("nope", [text])
except InferenceServerException as error:
    print("refused:", error.status(), error.message())
client.close()
