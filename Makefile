# `make demo` and `make test` work on a fresh machine that has only Python 3.11 (or newer) and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= torch==2.13.0
VENV   := .venv
PLAN   ?= dsl_examples/quickstart.plan

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM = false

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test bench clean

demo: $(VENV)/ready
	$(VENV)/bin/planc compile $(PLAN)
	$(VENV)/bin/planc run $(PLAN)

test: $(VENV)/ready-for-tests
	$(VENV)/bin/python -m pytest -q -n 2 $(ARGS)

bench: $(VENV)/ready-for-tests
	for bench in tests/bench/[a-z]*.py; do echo "== $$bench" && $(VENV)/bin/python -m $$(echo $${bench%.py} | tr / .) || exit 1; done

clean:
	rm -rf $(VENV) build runs *.egg-info .pytest_cache .hypothesis
	find compiler runtime dsl_examples tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up, done once: the stamp files are remade only when what they depend on changes.
# Torch comes first and alone, so that the build you want (see TORCH) is the one that stays.
$(VENV)/ready: pyproject.toml tests/constraints.txt
	test -x $(VENV)/bin/python || "$(PYTHON)" -m venv $(VENV)
	@echo "Installing PyTorch and the pinned dependencies into $(VENV) (once, some minutes) ..."
	$(PIP) install "$(TORCH)"
	$(PIP) install --constraint tests/constraints.txt --editable .
	touch $@

$(VENV)/ready-for-tests: $(VENV)/ready
	$(PIP) install --constraint tests/constraints.txt --editable ".[test]"
	touch $@
