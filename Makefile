# All that a person or CI runs. `make` alone prints this list. Nothing but make and Python 3.11 is needed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup up down test test-unit test-vllm check fix bench bench-quick bench-peers chaos image docs audit release clean fuzz

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make the two environments and build the model weights (instant when nothing changed)
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m gateway.stack.environments

up: setup  ## start the whole stack and print how to call it; DETACH=1 returns when it is ready, ARGS="..." adds options
	@$(PY) -m gateway up $(if $(DETACH),--detach) $(ARGS)

down:  ## stop the stack
	@if [ -x $(PY) ]; then $(PY) -m gateway down $(ARGS); else echo "Nothing runs here."; fi

# Tests with servers wait most of the time: more of them run at once than there are processors, the longest first, and the
# end-to-end tests on both stacks. What is `alone` measures, or brings processors or Redis to their limits. Where nobody
# writes byte code (PYTHONDONTWRITEBYTECODE), hundreds of processes would each compile the project anew.
test: setup  ## the whole test suite, against the real parts; with ARGS="..." pytest runs once, with these
ifdef ARGS
	@$(PY) -m pytest $(ARGS)
else
	@$(PY) -m compileall -q gateway local_runtime tests/kit
	@$(PY) -m pytest tests/unit tests/contract tests/component -n 2
	@$(PY) -m pytest tests/e2e tests/integration tests/parity -n 3 --dist loadgroup --no-loadscope-reorder --stack each -m "not alone"
	@$(PY) -m pytest tests/integration -m alone
endif

test-unit: setup  ## the unit tests alone
	@$(PY) -m pytest tests/unit -n 2 -q $(ARGS)

fuzz: setup  ## hostile input against every parser and both planes (docs/hostile-input.md); ARGS="--examples 500 --seed 7"
	@$(PY) -m tests.fuzz $(ARGS)

test-vllm: setup  ## the LLM plane against a real vLLM on the CPU; makes its environment (4 GB) when it is missing
	@$(PY) -m tests.vllm.environment
	@$(PY) -m pytest tests/vllm -n 0 $(ARGS)

check: setup  ## format, lint, types, import contracts, fast tests: what must be green before a commit
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports
	@$(PY) -m pytest tests/unit tests/contract tests/component -n 2 -q -m "not exhaustive" $(ARGS)

fix: setup  ## format, and mend what the linter can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: setup  ## measure every speed goal beside its peers, 15 minutes (docs/benchmarks.md); ARGS="--only relay"
	@$(PY) -m tests.bench $(ARGS)

bench-quick: setup  ## the same in under 3 minutes: fewer and shorter rounds
	@$(PY) -m tests.bench --quick $(ARGS)

chaos: setup  ## kill, pause, cut off and restart every part under load, and judge what clients saw; ARGS="--seed 7"
	@$(PY) -m tests.chaos $(ARGS)

bench-peers: setup  ## install what the benchmark compares with into build/peers; ARGS="vllm-router" for one
	@$(PY) -m tests.bench.suite.peers $(ARGS)

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BUILD = docker build --build-arg PIP_EXTRA_INDEX_URL=$(PIP_EXTRA_INDEX_URL)

image:  ## build the container images, tagged with the version; needs Docker (docs/compose.md)
	@command -v docker >/dev/null || { echo "Docker is needed: without it, make up runs the same parts on this machine."; exit 1; }
	@$(BUILD) -f deploy/docker/gateway.Dockerfile --target gateway -t hybrid-inference-gateway:$(VERSION) .
	@$(BUILD) -f deploy/docker/gateway.Dockerfile --target llm -t hybrid-inference-gateway-llm:$(VERSION) .
	@$(BUILD) -f deploy/docker/gateway.Dockerfile --target models -t hybrid-inference-gateway-models:$(VERSION) .
	@docker build -f deploy/docker/triton.Dockerfile --target triton -t hybrid-inference-gateway-triton:$(VERSION) .

docs: setup  ## write the references anew out of the code: docs/configuration.md, docs/api.md, docs/commands.md
	@$(PY) -m release.references

# --strict: what the index does not know is a failure, and not "no known vulnerabilities".
audit: setup  ## what is installed against its pins and hashes, and known weaknesses where pip-audit is installed
	@$(PY) -m release.audit
	@if command -v pip-audit >/dev/null; then pip-audit --strict --disable-pip --no-deps -r requirements/constraints.txt; \
	else echo "Known weaknesses were not looked for: pip-audit is not installed (pipx install pip-audit), and needs PyPI."; fi

release: setup  ## make wheel, sdist, SBOM, licence list and notes in dist/ (docs/releasing.md)
	@$(PY) -m release

clean:  ## remove the environments, built weights, run state and caches (stops the stack first)
	@$(MAKE) --no-print-directory down ARGS=
	@rm -rf .venv .venv-triton .venv-vllm .run build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find triton_models \( -name '*.pt' -o -name tokenizer.json -o -name labels.txt -o -name weights.npz -o -name '*.onnx' -o -name characters.txt -o -name .build.json \) -delete
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
