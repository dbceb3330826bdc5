# Every target sets itself up: .venv is made on first use, and again when pyproject.toml changes.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
STAMP := $(VENV)/.installed-$(firstword $(shell cksum pyproject.toml))
# Arguments for the command behind a target, as in: make serve ARGS="--port 9000"
ARGS ?=
# A Python 3.11 to make .venv with, where the one found is not the one wanted.
PYTHON ?=

.PHONY: help setup serve test check format bench soak clean

help:
	@echo "make serve   the service with the demo pair on 127.0.0.1:8000, until Ctrl-C"
	@echo "make test    the test suite"
	@echo "make check   format, lint, types, import layers"
	@echo "make bench   modes compared on the same work, and ways to roll back recurrent states"
	@echo "make soak    the long tests"
	@echo "make format  put the source into the project's format"
	@echo "make clean   remove .venv and everything that was generated"

setup: $(STAMP)

serve: $(STAMP)
	@$(BIN)/specdec serve $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest tests/test_layers.py

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP)
	@$(BIN)/specdec bench --rollback $(ARGS)

soak: $(STAMP)
	@$(BIN)/python -m pytest -m soak $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# A command of that name is not enough: it may be a version manager's stand-in, or lack the venv module.
FIND_PYTHON = for python in $(PYTHON) python3.11 /usr/bin/python3.11 /usr/local/bin/python3.11 \
	/opt/homebrew/bin/python3.11 python3 python; do \
		"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
		&& echo "$$python" && exit; \
	done

$(STAMP): pyproject.toml
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then \
		echo "No Python 3.11 with the modules venv and ensurepip is found." >&2; \
		echo "Install it (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; \
	fi; \
	echo "[setup 1/3] $(VENV), made with $$python"; \
	[ -x $(BIN)/python ] || "$$python" -m venv $(VENV)
	@echo "[setup 2/3] $(TORCH)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input $(TORCH)
	@echo "[setup 3/3] specdec and its dependencies"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input -e '.[dev]'
	@rm -f $(VENV)/.installed-*
	@touch $@
	@echo "[setup] done"
