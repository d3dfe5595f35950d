# Common tasks. PYTHON=... selects another interpreter.
PYTHON ?= .venv/bin/python
.DELETE_ON_ERROR:
.PHONY: setup check format test slow docs wheel clean

setup:  ## an environment for development in .venv
	python3 -m venv .venv
	.venv/bin/pip install -c .ci/constraints.txt -e ".[dev,plot]"

check:  ## what a change has to pass: linters, types, layers, fast tests
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q -n auto

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test:
	$(PYTHON) -m pytest -n auto

slow:  ## what `test` leaves out; docs/ and extras as CONTRIBUTING.md says
	$(PYTHON) -m pytest -n 2 --dist worksteal -m "slow or extra"

docs:  ## the site, in build/site; `mkdocs serve` shows it while you write
	$(PYTHON) -m pip install -q -c .ci/constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

wheel:  ## dist/*.whl and dist/*.tar.gz
	$(PYTHON) -m pip install -q build
	$(PYTHON) -m build

clean:
	rm -rf dist build .venv-test .pytest_cache .ruff_cache .mypy_cache
