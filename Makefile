# Everything from a clean clone with python3 alone: each target sets up .venv first, and is quick the second time.
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
PYTHON ?= python3

# Three processes, also on two cores: slow tests wait for servers and hosts now and then. Each process more costs a
# minute of CPU time: it imports every test, both frameworks and the clients, and has servers and checkpoints of its own.
PROCESSES ?= 3
CORES := $(shell getconf _NPROCESSORS_ONLN)
FAST_PROCESSES := $(shell echo $$(($(CORES) < 4 ? $(CORES) + 1 : 4)))
BY_FILE := --dist loadfile --no-loadscope-reorder

# Tests start hundreds of Python processes: without bytecode files, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast lint format pictures clean

demo: $(VENV)/.ready
	$(BIN)/disagg demo

test: $(VENV)/.ready
	-$(MAKE) $(VLLM)/.ready || { echo "vLLM's CPU build could not be installed: its tests are skipped"; false; }
	tests/testbed/requirements.sh
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) $(BY_FILE)

# Units only: no servers, no hosts behind SSH, no engines. Some wait, so a process more than cores.
test-fast: $(VENV)/.ready
	$(BIN)/python -m pytest --numprocesses $(FAST_PROCESSES) $(BY_FILE) -m "not slow"

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck --shell sh disagg/fleet/scripts/*.sh
	$(BIN)/shellcheck scripts/*.sh tests/testbed/*.sh

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The README's pictures show times: draw them as root, on a machine that does nothing else.
pictures: $(VENV)/.ready
	$(BIN)/disagg demo --svg docs/demo.svg
	$(BIN)/python -m tests.surveys.picture_fleet docs/fleet.svg

# scripts/environment.py removes the stamp first, and makes an environment without one anew.
$(VENV)/.ready: pyproject.toml disagg/fleet/constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "error: there is no $(PYTHON) on PATH: install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) scripts/environment.py $(VENV) --say "Installing PyTorch, MLX and the rest into $(VENV), some minutes: \
	0.4 GB to download, or 3 GB (5 GB on disk) on Linux if pip's torch is the one with CUDA" -- --constraint disagg/fleet/constraints.txt --editable '.[dev]'
	@touch $@

# vLLM wants another transformers than MLX, so it has an environment of its own: its CPU build, for tests.
$(VLLM)/.ready: tests/engines/vllm/requirements.txt
	@$(PYTHON) scripts/environment.py $(VLLM) -- --constraint $< torch -- --no-deps --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
