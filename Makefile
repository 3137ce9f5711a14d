# make image PROMPT="a red apple"   draw one picture (installs the core on first use)
# make demo                         the page in the browser
# make test                         everything, on the reference set of packages
# make test-latest                  the fast tests, on the latest set
# make lint                         ruff and mypy
# make clean                        remove what make made, pictures excepted

PYTHON ?= python3
PROMPT ?= a red apple
OUT    ?= image.png
SEED   ?= 0

# The text reaches the shell through the environment, and make never expands it: quotes, $ and ` are just characters.
override PROMPT := $(value PROMPT)
override OUT    := $(value OUT)
override SEED   := $(value SEED)
export PROMPT OUT SEED

REFERENCE := .venv
LATEST    := .venv-latest
PYTEST    := pytest -n 2 --dist worksteal
SOURCES   := $(wildcard app.py) vargen pipelines kernels assets tests

.PHONY: image demo test test-latest lint ruff types clean

image: $(REFERENCE)/.core
	@$(REFERENCE)/bin/vargen generate --seed "$$SEED" -o "$$OUT" -- "$$PROMPT"

demo: $(REFERENCE)/.demo
	@$(REFERENCE)/bin/python app.py

test: $(REFERENCE)/.all lint
	$(REFERENCE)/bin/$(PYTEST)

test-latest: $(LATEST)/.fast
	$(LATEST)/bin/$(PYTEST) -m "not slow"

lint: ruff types

ruff: $(REFERENCE)/.all
	$(REFERENCE)/bin/ruff check $(SOURCES)

# Types are checked as a user's checker sees them: on the package as installed, vargen.pipelines and all, because
# checkers do not follow the import hook of an editable install. build/ goes first: it may hold deleted modules.
types: $(REFERENCE)/.all
	rm -rf build
	$(REFERENCE)/bin/python -m pip install --quiet --no-deps --no-build-isolation --target build/types .
	cd build/types && ../../$(REFERENCE)/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p vargen

# The stamps: packages are installed again only when what decides them changes.
$(REFERENCE)/.core: pyproject.toml constraints.txt | $(REFERENCE)/bin/python
	$(REFERENCE)/bin/python -m pip install -c constraints.txt -e .
	@touch $@

$(REFERENCE)/.demo: pyproject.toml constraints.txt | $(REFERENCE)/bin/python
	$(REFERENCE)/bin/python -m pip install -c constraints.txt -e ".[demo]"
	@touch $(REFERENCE)/.core $@

$(REFERENCE)/.all: pyproject.toml constraints.txt | $(REFERENCE)/bin/python
	$(REFERENCE)/bin/python -m pip install -c constraints.txt -e ".[all]"
	@touch $(REFERENCE)/.core $(REFERENCE)/.demo $@

# Everything but the official ImageReward, which does not import with today's transformers.
$(LATEST)/.fast: pyproject.toml constraints-latest.txt | $(LATEST)/bin/python
	$(LATEST)/bin/python -m pip install -c constraints-latest.txt -e ".[demo,eval,kernels,video,train,dev]"
	@touch $@

$(REFERENCE)/bin/python $(LATEST)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"vargen needs Python 3.11 or newer, and $(PYTHON) is {v}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(@D)/..

clean:
	rm -rf $(REFERENCE) $(LATEST) build dist vargen.egg-info .pytest_cache .mypy_cache .ruff_cache
