PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-latest test-lowest docs tables format clean

help:  ## print this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{ printf "make %-11s %s\n", $$1, $$2 }'

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(VENV)/installed  ## five clients, five architectures, skewed data: watch them teach each other
	$(BIN)/barter run

# Without bytecode, every worker would rewrite the assertions of all test files anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/installed  ## lint, types and the test suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto --dist worksteal

test-slow: $(VENV)/installed  ## the tests that take minutes
	$(BIN)/pytest -m slow

# Both without Flower, which pins typer and rich: their environments have what pip chooses for everybody else.
test-latest:  ## the test suite with the newest versions of everything, in an environment of its own
	$(PYTHON) -m venv --clear $(VENV)-latest
	$(VENV)-latest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e ".[test]"
	$(VENV)-latest/bin/python -m pip list
	$(VENV)-latest/bin/python -m pytest -n auto --dist worksteal

test-lowest:  ## the test suite with the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv --clear $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e ".[test]"
	$(VENV)-lowest/bin/python -m pip list
	$(VENV)-lowest/bin/python -m pytest -n auto --dist worksteal

docs: $(VENV)/installed  ## the documentation site: build/docs/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tables: $(VENV)/installed  ## write the tables of all pages from the stored results
	$(BIN)/python -m benchmarks.tables

format: $(VENV)/installed  ## bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environments and caches
	rm -rf $(VENV) $(VENV)-latest $(VENV)-lowest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
