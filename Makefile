# Fresh machine:  make demo   or   make test
PYTHON ?= python3
BIN := .venv/bin
LOOPS := src/pfedla/kernels/module.cpp $(wildcard src/pfedla/kernels/*.inc)

.PHONY: help install demo test check sanitize soak audit docs format bench bench-peers clean

help:
	@echo "make demo    set up, then compare four methods on the embedded images (runs/demo)"
	@echo "make test    set up, then run every check that CI runs"
	@echo "make check   the checks alone: formatting, lint, types, tests"
	@echo "make sanitize   the compiled loops' tests with GCC's address and undefined-behaviour sanitizers, AVX-512 emulated"
	@echo "make soak    kill runs at random moments and resume them, for ten minutes"
	@echo "make audit   ask the advisory databases about every installed package (needs the internet)"
	@echo "make docs    the documentation as a site, build/docs/index.html; warnings are errors"
	@echo "make format  format and fix what can be fixed"
	@echo "make bench   speed and memory, as ratios within one run (docs/benchmarks.md); a quarter of an hour"
	@echo "make bench-peers   set up Flower and pfl under .bench-envs, then compare with them; seven minutes after set-up"
	@echo "make clean   remove the environment and caches (never runs/)"

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt $(LOOPS)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pfedla needs \
	Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name one: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	rm -f src/pfedla/kernels/_compiled.*.so  # else loops that do not compile would be hidden by older ones
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/pfedla demo --out runs/demo

test: install
	$(MAKE) check

check:
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(LOOPS)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

# A second build of the package; Python itself is not instrumented, so the runtimes are loaded before it.
sanitize: install
	rm -rf build/sanitized
	CXXFLAGS="-g -DEMULATE_AVX512 -fsanitize=address,undefined -fno-sanitize-recover=all" $(BIN)/python -W ignore \
		-c 'import setuptools; setuptools.setup()' --quiet build --build-base build/sanitized --build-lib build/sanitized
	grep -q __asan_ build/sanitized/pfedla/kernels/*.so  # else the flags were lost, and nothing would be found
	PYTHONPATH=build/sanitized ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest -q -n 0 --capture=no tests/test_kernels.py tests/test_blocks.py tests/test_chain.py tests/test_models.py

soak: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --seconds 600

audit: install
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --skip-editable

docs: install
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(LOOPS)

BENCH := $(BIN)/python -m benchmarks --json results/benchmarks.json --page docs/benchmarks.md

bench: install
	$(BENCH)

# Each peer in an environment of its own: only torch's version is ours, the rest is what the peer asks for.
.bench-envs/%/.installed:
	$(PYTHON) -m venv .bench-envs/$*
	.bench-envs/$*/bin/python -m pip install --quiet $(PEER) "$$(grep ^torch== constraints.txt)"
	touch $@

.bench-envs/flower/.installed: PEER = 'flwr[simulation]'
.bench-envs/pfl/.installed: PEER = pfl

bench-peers: install .bench-envs/flower/.installed .bench-envs/pfl/.installed
	$(BENCH) cluster
	$(BENCH) peers

clean:
	rm -rf .venv .bench-envs build .mypy_cache .ruff_cache .pytest_cache .hypothesis
