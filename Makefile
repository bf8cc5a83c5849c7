# Every target prepares what it needs; the machine has to offer make, Python 3.11+ and a package index.
#
#   make PYTHON=python3.12 test      choose the interpreter (only read when .venv is created; `make clean` first)
#   make test ARGS="-k topology"     pass arguments on: ARGS reaches pytest, the demo and the benchmark
#
# On Linux the torch of PyPI is the CUDA build: it runs on a CPU too but is large. For the CPU build use
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
TYPED  := build/typing

# Without bytecode each of the hundred processes that the tests start would compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo check test suite lint types format bench clean dist docs

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo ## Decode with several drafts per step and show the gain: two to five minutes
	@$(BIN)/python examples/demo.py $(ARGS)

# Processes with one thread each: twice as fast as the other way round, and steady on a busy machine. One more than there
# are processors, as many tests wait for processes that they have started. Teams that wait leave their processor to others.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1))

# The quick tier: the proofs of losslessness with their negative controls, and the vocabulary that all else stands on.
QUICK := $(addprefix tests/,decoding/test_losslessness.py decoding/test_generate_law.py sampling trees verifiers \
	test_builders.py test_imports.py deciders/test_costs.py deciders/test_deciders.py target/test_target.py \
	target/test_cache.py) --ignore=tests/verifiers/test_adverse_rows.py

check: lint ## Lint, type-check and run the quick tests: a minute or two
	$(PYTEST) $(QUICK) $(ARGS)

test: ## Lint, type-check and run all tests but those that soak: 15 to 25 minutes on two cores
	$(MAKE) --no-print-directory --jobs=2 suite lint

suite: $(VENV)/.compiled
	$(PYTEST) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: types ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy needs a folder that looks like the installed package: links from the import names to the source folders.
types: $(VENV)/.installed-dev ## Check types
	rm -rf $(TYPED) && mkdir -p $(TYPED)/arbordraft
	ln -s $(CURDIR)/toolkit/* $(CURDIR)/kernels $(CURDIR)/training $(CURDIR)/exports $(TYPED)/arbordraft/
	MYPYPATH=$(TYPED):examples/benchmarks $(BIN)/mypy --package arbordraft --package arborlab

format: $(VENV)/.installed-dev ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-demo ## Measure what ARGS names, by default against transformers
	$(BIN)/arbordraft bench $(or $(ARGS),compare)

docs: $(VENV)/.installed-docs ## Build the documentation into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/.installed-dev ## Build the wheel and the source archive, and check both
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove everything that was built here, .venv included
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Bytecode comes when modules are first imported: compiling all there is takes as long as installing it.
# A stamp is written last, so that an interrupted set-up is never taken for a finished one.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "arbordraft needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "This Python cannot create virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# Once by one process, or all that run tests would compile the same modules side by side.
$(VENV)/.compiled: $(VENV)/.installed-dev
	-OMP_NUM_THREADS=1 $(BIN)/python -m pytest --collect-only -qq > /dev/null
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	@echo "Installing arbordraft[$*] into $(VENV): a minute or two, longer where torch brings CUDA along"
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile --editable '.[$*]'
	@touch $@
