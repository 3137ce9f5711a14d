# make image PROMPT="a red apple"   generate one image (installs the core on first use)
#                                  MODEL=emoji-var: by the next-scale model, in six passes; any folder; also for the page
# make demo                         the page in the browser
# make test                         lint, types and the tests, on the reference set of packages
# make test-extended                the tests that it leaves out: pages in a browser, training, quality of weights, deeper sums
# make test-latest                  the tests that meet other packages than torch, on the latest set
# make test-lowest                  the same, on the oldest packages that pyproject.toml allows
# make test-gpu                     the kernels and CUDA graphs, on a machine with an NVIDIA GPU
# make gpu                         what depends on the GPU, checked and measured: report/report.md; again to go on
# make docs                         the documentation site, in build/site
# make lint                         ruff, mypy and the direction of imports
# make clean                        remove what make made, images excepted
#
# Where torch comes from: on a Linux machine without an NVIDIA GPU, PyTorch's index of CPU wheels, because the ordinary index
# has gigabytes of CUDA there. Another index: make image TORCH_INDEX=URL; the ordinary one: make image TORCH_INDEX=

PYTHON ?= python3
PROMPT ?= a red apple
MODEL  ?= emoji
OUT    ?= image.png
SEED   ?= 0

TORCH_INDEX ?= auto
CPU_WHEELS  := https://download.pytorch.org/whl/cpu

# The text reaches the shell through the environment, and make never expands it: quotes, $ and ` are just characters.
override PROMPT := $(value PROMPT)
override MODEL  := $(value MODEL)
override OUT    := $(value OUT)
override SEED   := $(value SEED)
export PROMPT MODEL OUT SEED TORCH_INDEX

REFERENCE := .venv
LATEST    := .venv-latest
LOWEST    := .venv-lowest
DOCS      := .venv-docs
# One process more than most laptops have cores for: many tests wait for other processes.
PYTEST    := pytest -n 3 --dist worksteal
SOURCES   := $(wildcard app.py) vargen pipelines kernels assets recipes examples tests benchmarks docs

.PHONY: image demo test test-extended test-latest test-lowest test-gpu gpu docs lint ruff types clean

image: $(REFERENCE)/.core
	@$(REFERENCE)/bin/vargen generate --model "$$MODEL" --seed "$$SEED" -o "$$OUT" -- "$$PROMPT"

demo: $(REFERENCE)/.demo
	@$(REFERENCE)/bin/python app.py --model "$$MODEL"

test: $(REFERENCE)/.all lint
	$(REFERENCE)/bin/$(PYTEST) -m "not slow and not extended"

test-extended: $(REFERENCE)/.all
	$(REFERENCE)/bin/$(PYTEST) -m "slow or extended"

# What differs from the reference set is diffusers, transformers, huggingface-hub, timm, open-clip and Gradio.
test-latest: $(LATEST)/.fast
	$(LATEST)/bin/$(PYTEST) -m "packages and not slow" tests/models tests/convert tests/pipelines tests/in_place tests/demo tests/scoring \
		tests/training tests/eval/test_features.py tests/test_compat.py

# The extras of this set leave the page, the scorers and evaluation out.
test-lowest: $(LOWEST)/.fast
	$(LOWEST)/bin/$(PYTEST) -m "packages and not slow" tests/models tests/convert tests/pipelines tests/cli tests/training

# One process: several would share the GPU, and compile every kernel each.
test-gpu: $(REFERENCE)/.all
	$(REFERENCE)/bin/python -c 'import torch; torch.cuda.is_available() or exit("make test-gpu needs an NVIDIA GPU")'
	$(REFERENCE)/bin/pytest tests/kernels tests/decoding/test_graphs.py

gpu: $(REFERENCE)/.all
	$(REFERENCE)/bin/python benchmarks/gpu.py --minutes 9 -o report

# mkdocstrings reads the sources without importing them, so this environment needs no torch.
docs: $(DOCS)/.tools
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

lint: ruff types

ruff: $(REFERENCE)/.all
	$(REFERENCE)/bin/ruff check $(SOURCES)

# Types are checked as a user's checker sees them: on the package as installed, vargen.pipelines and all, because checkers do
# not follow the import hook of an editable install; and on recipes beside it. build/ goes first: it may hold deleted modules.
types: $(REFERENCE)/.all
	rm -rf build
	$(REFERENCE)/bin/python -m pip install --quiet --no-deps --no-build-isolation --target build/types .
	cp -r recipes build/types/
	cd build/types && ../../$(REFERENCE)/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p vargen -p recipes
	cd build/types && ../../$(REFERENCE)/bin/lint-imports --no-cache --no-logo ../../pyproject.toml

# Shell: installs the packages $(2) into the environment of the target, as the constraints in $(1) have them; what needs torch
# then finds it there. torchvision comes along: that of another index does not load beside it. Whoever cannot reach the CPU wheels
# gets those of the ordinary index, and is told.
define install_torch
set -e; \
install() { $(@D)/bin/python -m pip install -c $(1) "$$@" $(2); }; \
if [ "$$TORCH_INDEX" != auto ]; then install $${TORCH_INDEX:+--index-url "$$TORCH_INDEX"}; exit; fi; \
if [ "$$(uname -s)" = Linux ] && ! nvidia-smi -L > /dev/null 2>&1; then \
  if $(@D)/bin/python -c 'from urllib.request import urlopen; urlopen("$(CPU_WHEELS)/torch/", timeout=5)' 2> /dev/null; then \
    echo "No NVIDIA GPU: torch from $(CPU_WHEELS) (another index: make TORCH_INDEX=URL)"; \
    install --index-url $(CPU_WHEELS) && exit; \
  fi; \
  echo "$(CPU_WHEELS) cannot be used: torch from the ordinary index, which may bring gigabytes of CUDA"; \
fi; \
install
endef

# The stamps: packages are installed again only when what decides them changes.
$(REFERENCE)/.torch: constraints.txt | $(REFERENCE)/bin/python
	@$(call install_torch,$<,torch torchvision)
	@touch $@

# The extras of this set leave torchvision out.
$(LOWEST)/.torch: constraints.txt | $(LOWEST)/bin/python
	@$(call install_torch,$<,torch)
	@touch $@

$(LATEST)/.torch: constraints-latest.txt | $(LATEST)/bin/python
	@$(call install_torch,$<,torch torchvision)
	@touch $@

$(REFERENCE)/.core: pyproject.toml constraints.txt | $(REFERENCE)/.torch
	$(REFERENCE)/bin/python -m pip install -c constraints.txt -e .
	@touch $@

$(REFERENCE)/.demo: pyproject.toml constraints.txt | $(REFERENCE)/.torch
	$(REFERENCE)/bin/python -m pip install -c constraints.txt -e ".[demo]"
	@touch $(REFERENCE)/.core $@

$(REFERENCE)/.all: pyproject.toml constraints.txt | $(REFERENCE)/.torch
	$(REFERENCE)/bin/python -m pip install -c constraints.txt -e ".[all,ray]"
	@touch $(REFERENCE)/.core $(REFERENCE)/.demo $@

$(LATEST)/.fast: pyproject.toml constraints-latest.txt | $(LATEST)/.torch
	$(LATEST)/bin/python -m pip install -c constraints-latest.txt -e ".[demo,eval,kernels,video,serve,train,dev]"
	@touch $@

# uv, because pip resolves to the newest only. It keeps the torch that is there: torch's own lower bound is not tried, because
# the ordinary index has older releases for CUDA alone.
$(LOWEST)/.fast: pyproject.toml | $(LOWEST)/.torch
	$(LOWEST)/bin/python -m pip install uv
	$(LOWEST)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(LOWEST)/torch.txt
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct -c $(LOWEST)/torch.txt -e ".[train,dev]"
	@touch $@

$(DOCS)/.tools: pyproject.toml | $(DOCS)/bin/python
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)/tools.txt
	$(DOCS)/bin/python -m pip install -r $(DOCS)/tools.txt
	@touch $@

$(REFERENCE)/bin/python $(LATEST)/bin/python $(LOWEST)/bin/python $(DOCS)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"vargen needs Python 3.11 or newer, and $(PYTHON) is {v}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(@D)/..

clean:
	rm -rf $(REFERENCE) $(LATEST) $(LOWEST) $(DOCS) build dist vargen.egg-info .pytest_cache .mypy_cache .ruff_cache
