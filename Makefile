# Fresh machine: Python >= 3.11, git and make. `make demo`, `make test`, `make test-processes`, `make test-exhaustive`, `make check`.
# A CPU build of torch where the index offers one: make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
TORCH_INDEX ?=
PROTOS := $(wildcard proto/editpb/*.proto)

.PHONY: demo test test-processes test-exhaustive check format stubs reference clean
demo: $(VENV)/.run
	$(BIN)/edit-lab demo $(ARGS)

# Else every process that a test starts compiles the project again, and every worker the tests.
test test-processes test-exhaustive: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 4 --dist worksteal -m "not processes" $(ARGS)

test-processes: $(VENV)/.dev
	$(BIN)/python -m pytest -n 4 --dist worksteal -m processes $(ARGS)

test-exhaustive: $(VENV)/.dev
	EXHAUSTIVE=1 $(BIN)/python -m pytest -n 4 --dist worksteal -m "not processes" $(ARGS)
	EXHAUSTIVE=1 $(BIN)/python -m pytest -n 4 --dist worksteal -m processes $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile
	PATH="$(abspath $(BIN)):$$PATH" sh proto/check-drift.sh
	$(BIN)/python docs/make_reference.py --check

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

stubs: $(VENV)/.dev
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)

reference: $(VENV)/.dev
	$(BIN)/python docs/make_reference.py

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed; say make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "torch>=2.9,<2.14"
	touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info
