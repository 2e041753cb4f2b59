# make train and make test set everything up on a fresh machine: python3 with venv, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := CMakeLists.txt $(wildcard cpu/* cuda/*) $(VENV)/modules
# A module is compiled when it is first imported, then kept: most of what is installed never is.
unexport PYTHONDONTWRITEBYTECODE
INSTALL = $(BIN)/python -m pip install --quiet --no-compile

.PHONY: train test test-all lint bench clean

train: $(VENV)/installed
	@test -d stores/community || $(BIN)/mggcn generate community stores/community
	@echo "--- MLP: the features alone"
	@$(BIN)/mggcn train stores/community --config recipes/community.toml --set model.kind=mlp
	@echo "--- GCN: the same features and the graph"
	@$(BIN)/mggcn train stores/community --config recipes/community.toml

# Most tests use one core and now and then wait: processes share them, one more than there are cores, at most four.
PYTEST := $(BIN)/python -m pytest --dist worksteal --numprocesses \
  $(shell cores=$$(nproc 2>/dev/null || echo 2); if [ $$cores -lt 4 ]; then expr $$cores + 1; else echo 4; fi)

# Every idea once.
test: $(VENV)/test-installed
	$(PYTEST)

# More combinations as well, and what CUDA's compilers say.
test-all: $(VENV)/test-installed $(VENV)/compilers
	$(PYTEST) -m "not slow"

lint: $(VENV)/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@mkdir -p build
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)" pyright --verifytypes mggcn --ignoreexternal >build/types.txt || { cat build/types.txt; exit 1; }
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror cpu/*.cpp cpu/*.h cuda/*.cu cuda/*.cuh tests/emulator/*.hpp tests/emulator/*.cu bench/gpu/*.cu

# The pages and the reference of the Python API, in build/site; sources are read, not imported. The variable silences an advertisement.
.PHONY: docs
docs: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A wheel in dist/ for machines without a compiler: torch's libgomp is used, not brought along. Two minutes of processor time.
.PHONY: wheel
wheel: $(VENV)/wheel-installed
	rm -rf build/wheel && mkdir -p build/wheel
	@echo "--- compiling the CPU kernels for all instruction sets"
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/mggcn-*.whl

# CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer under their tests: minutes to build, then some times as long.
.PHONY: sanitize
sanitize: $(VENV)/test-installed
	$(BIN)/python -m tests.sanitized tests/backend tests/partition tests/blocks tests/graph/sources/test_edge_list.py tests/graph/sources/test_matrix_market.py -q

# Changed stores, sources, settings and checkpoints: make fuzz MINUTES=30. Then every byte of headers and meta.json, and thousands of bits.
MINUTES ?= 5
.PHONY: fuzz
fuzz: $(VENV)/test-installed
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)
	$(BIN)/python -m tests.fuzz.flips

bench: $(VENV)/test-installed
	$(BIN)/python bench/run_all.py --quick --out build/bench

clean:
	rm -rf $(VENV) build dist stores runs

$(VENV)/pip:
	@command -v c++ >/dev/null || command -v g++ >/dev/null || { \
	  echo "mggcn compiles its CPU kernels and found no C++ compiler; install one, for example: apt-get install g++"; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mggcn needs Python 3.11 or later, found " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

# The editable install maps the modules that exist: this list changes when one is added or moved.
$(VENV)/modules: $(VENV)/pip FORCE
	@find mggcn -name '*.py' | sort >$@.$$$$; if cmp -s $@.$$$$ $@; then rm $@.$$$$; else mv $@.$$$$ $@; fi

.PHONY: FORCE
FORCE:

# torch first and pinned: without the constraint pip may take a build with gigabytes of CUDA libraries.
$(VENV)/installed: $(VENV)/pip pyproject.toml constraints-cpu.txt $(SOURCES)
	@echo "--- torch: a download of 200 MB"
	$(INSTALL) -c constraints-cpu.txt torch
	@echo "--- mggcn: its CPU kernels are compiled, a minute and a half of processor time"
	$(INSTALL) -c constraints-cpu.txt -e .
	@touch $@

$(VENV)/test-installed: $(VENV)/installed
	$(INSTALL) -c constraints-cpu.txt --group test
	@touch $@

# CUDA's compilers (a download of 185 MB) for tests/cuda. Where they cannot be had, these tests look for others and, where
# there are none, say that they skip; with CI=true they fail.
$(VENV)/compilers: $(VENV)/pip pyproject.toml
	rm -rf $@
	$(INSTALL) --target $@ --group compilers || echo "no CUDA compilers here"
	@mkdir -p $@ && touch $@

# CuPy for CUDA 12 and 13 (a download of 0.6 GB) for pytest -m slow tests/cuda/test_cupys.py.
$(VENV)/cupys: $(VENV)/pip pyproject.toml
	rm -rf $@
	$(INSTALL) --no-deps --target $@/12 --group cupy12
	$(INSTALL) --no-deps --target $@/13 --group cupy13

$(VENV)/dev-installed: $(VENV)/installed
	$(INSTALL) -c constraints-cpu.txt --group dev
	@touch $@

$(VENV)/wheel-installed: $(VENV)/pip pyproject.toml
	$(INSTALL) --group wheel
	@touch $@

$(VENV)/docs-installed: $(VENV)/pip pyproject.toml
	$(INSTALL) --group docs
	@touch $@
