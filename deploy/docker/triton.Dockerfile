# The official server, with what our Python models import. It has the C++ backends for TorchScript and ONNX.
FROM nvcr.io/nvidia/tritonserver:24.10-py3
# numpy 2 breaks the tensors of this release's Python backend without an error.
RUN pip install --no-cache-dir --only-binary :all: "tokenizers>=0.21" "pillow>=10" "numpy<2"
# The image's own user; it owns nothing that it serves.
USER triton-server
