# The official server, with what our Python models import. It has the C++ backends for TorchScript and ONNX.
FROM nvcr.io/nvidia/tritonserver:24.10-py3 AS triton
# numpy 2 breaks the tensors of this release's Python backend without an error. Its Python is 3.10: the last Pillow for
# that is 12.
RUN pip install --no-cache-dir --only-binary :all: tokenizers==0.23.3 pillow==12.3.0 numpy==1.26.4
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s \
    CMD ["curl", "-fsS", "-o", "/dev/null", "http://127.0.0.1:8000/v2/health/ready"]
# The image's own user, triton-server; it owns nothing that it serves.
USER 1000
