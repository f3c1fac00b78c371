"""OpenAI's own client on the gateway: only the base URL and the key are ours.

    GATEWAY_KEY=... python examples/openai_sdk.py

Prints:

    a task is a model: general_llm
    2 vectors of 384 numbers; the two sentences are 0.65 alike
    a chat of ... tokens: ...
    a stream of ... pieces
    refused: 404 model_not_found
"""

import os
import sys

import numpy as np
import openai

url, key = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080"), os.environ.get("GATEWAY_KEY")
if not key:
    print("set GATEWAY_KEY: after `make up` it is in .run/dev-key (see examples/README.md)", file=sys.stderr)
    sys.exit(2)
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)

print("a task is a model:", next(model.id for model in client.models.list() if model.id == "general_llm"))

texts = ["a man is playing a guitar", "someone plays an instrument"]
vectors = np.array([row.embedding for row in client.embeddings.create(model="text-embedding", input=texts).data])
print(
    f"{len(vectors)} vectors of {vectors.shape[1]} numbers; the two sentences are {vectors[0] @ vectors[1]:.2f} alike"
)

asked = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.chat.completions.create(model="general_llm", messages=asked, max_tokens=20)
print(f"a chat of {answer.usage.total_tokens} tokens:", answer.choices[0].message.content.replace("\n", " "))

stream = client.chat.completions.create(model="general_llm", messages=asked, max_tokens=20, stream=True)
print("a stream of", sum(1 for chunk in stream if chunk.choices and chunk.choices[0].delta.content), "pieces")

try:
    client.chat.completions.create(model="no-such-task", messages=asked)
except openai.NotFoundError as error:
    print("refused:", error.status_code, error.code)
