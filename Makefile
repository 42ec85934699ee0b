# From a fresh clone, `make demo` and `make test` do all the set-up they need: a virtual environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
AXE := 4.10.3
# Else every process of pytest rewrites the assertions of all tests anew, and every process that a test starts compiles the package.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-long test-mutants test-gpu test-browser browser check lock lock-check audit sbom format docs docs-serve tutorial results speed peers clean

demo: .venv/ready
	$(BIN)/hatrack demo

# The tiers of tests: CONTRIBUTING.md says what each costs.
test: .venv/ready
	$(BIN)/pytest -n auto

test-slow: .venv/ready
	$(BIN)/pytest -n auto -m 'slow and not gpu'

# The slow tests with the full number of random cases.
test-long: .venv/ready
	HATRACK_TEST_LONG=1 $(BIN)/pytest -n auto -m 'slow and not gpu'

# Ten changes of the code that tests must notice; `python -m dev.mutants --all` makes many more (docs/mutants.md).
test-mutants: .venv/ready
	$(BIN)/python -m dev.mutants

test-gpu: .venv/ready
	$(BIN)/pytest -m gpu

# The page in a real browser: Chromium of the system, which root may install, and axe for accessibility, from npm.
test-browser: .venv/ready browser build/axe/ready
	$(BIN)/pytest -n 0 -m browser

browser:
	@command -v chromium >/dev/null || test -n "$$HATRACK_CHROMIUM" || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || { echo "chromium is missing: apt-get install chromium, or set HATRACK_CHROMIUM to its path" >&2; exit 1; }

build/axe/ready:
	@command -v npm >/dev/null || { echo "npm is missing: apt-get install npm (it fetches axe-core $(AXE))" >&2; exit 1; }
	mkdir -p build/axe
	npm install --prefix build/axe --no-save --no-audit --no-fund --silent axe-core@$(AXE)
	touch build/axe/ready

check: .venv/ready lock-check audit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The versions of constraints.txt with the hashes of their files (docs/supply_chain.md); needs the network. It runs in the
# environment that is there, since a new one could not be made from a list that is out of date.
lock:
	$(BIN)/python -m dev.lock

lock-check: .venv/ready
	$(BIN)/python -m dev.lock --check

# Known weaknesses of what is installed; skipped where the service that lists them can't be reached.
audit: .venv/ready
	$(BIN)/python -m dev.audit

# A list of what is installed, in the format of CycloneDX.
sbom: .venv/ready
	mkdir -p build
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation as a site with search, in site/; it needs no network, neither to build nor to read.
docs: .venv/ready
	$(BIN)/python -m dev.site
	$(BIN)/zensical build --clean --strict
	@echo "make docs-serve shows site/ in a browser; opened as files the pages have no search"

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000

# The tutorial as a notebook.
tutorial: .venv/ready
	$(BIN)/python -m dev.tutorial --notebook docs/tutorial/what_is_forgetting.ipynb

# The pages of docs/results and the table of the README, from the records.
results: .venv/ready
	$(BIN)/python -m dev.results

speed: .venv/ready
	$(BIN)/python -m speed.table

# Another library to compare with, in an environment of its own.
peers: .venv-peers/ready

.venv-peers/ready:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 setuptools
	.venv-peers/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 torchvision==0.28.0 avalanche-lib==0.6.0
	touch .venv-peers/ready

clean:
	rm -rf .venv .venv-peers build site *.egg-info .pytest_cache .mypy_cache .ruff_cache

# requirements.lock has a hash for every file but torch's, which is installed by its exact version: a range would fetch
# gigabytes of GPU libraries. The lock lists all packages, so pip must not look for others (some ask for a range of torch);
# `pip check` tells if one is missing.
.venv/ready: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e '.[dev]'
	$(BIN)/pip check --disable-pip-version-check
	touch .venv/ready
