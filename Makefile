# Fresh machine:  make demo   or   make test
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help install demo test check format bench clean

help:
	@echo "make demo    set up, then compare four methods on the embedded images (runs/demo)"
	@echo "make test    set up, then run every check that CI runs"
	@echo "make check   the checks alone: formatting, lint, types, tests"
	@echo "make format  format and fix what can be fixed"
	@echo "make bench   speed, as ratios within one run"
	@echo "make clean   remove the environment and caches (never runs/)"

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/pfedla demo --out runs/demo

test: install
	$(MAKE) check

check:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks.training

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
