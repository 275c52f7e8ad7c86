# specjax: set-up, tests and experiments; `make` alone lists the targets.
#
# Everything runs in .venv, which is made on first use and refreshed when pyproject.toml or constraints.txt change.
# On a GPU or TPU machine: make quickstart EXTRAS=experiments,cuda13  (or experiments,tpu)
# With an interpreter of your own: make quickstart PYTHON=/path/to/python

EXTRAS := experiments
PYTHON :=

VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed-$(EXTRAS)

# Weights in huge pages: a forward on a CPU takes about half the time (docs/performance.md). Only Linux's C library reads
# it, when a process starts; a value that is set already stays, whatever it says.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

# The compilers of both accelerators live here; in $(VENV) jax would try to start them.
KERNELS := build/kernels
JAX_VERSION = $(shell sed -n 's/^jax==//p' constraints.txt)

# Each candidate is run, not only looked up: a pyenv shim exists also for versions that are not selected, and Debian
# ships a Python without ensurepip.
CANDIDATES = python3.12 python3.13 python3.14 python3 python "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-4]*/bin/python
PROBE := import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info < (3, 15))
NO_PYTHON := Found no Python 3.12 to 3.14 with venv: install one (apt install python3-venv on Debian 13 or Ubuntu 24.04, brew install python@3.12 on macOS, pyenv install 3.12 elsewhere) and run make again.

.PHONY: help install quickstart tables test lint notebooks docs zoo bench kernels shapes device clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 14

install: $(INSTALLED)  ## install into .venv, which every other target does when it has to

quickstart: $(INSTALLED)  ## run the example sweep on the models that ship: a table, plots and a report
	$(RUN) -m experiments.run configs/quickstart.toml

tables: $(INSTALLED)  ## make the papers' tables on the models that ship, in one report
	$(RUN) -m experiments.tables configs/tables/*.toml

test: $(INSTALLED) $(VENV)/.group-test  ## run the tests
	$(RUN) -m pytest --numprocesses auto --dist loadfile

lint: $(INSTALLED) $(VENV)/.group-lint  ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright

notebooks: $(INSTALLED) $(VENV)/.group-docs  ## run the notebooks, two at a time; what they show goes to build/notebooks
	@rm -rf build/notebooks && mkdir -p build/notebooks && cp notebooks/*.ipynb build/notebooks
	ls build/notebooks/*.ipynb | xargs -n 1 -P 2 $(VENV)/bin/jupyter execute --inplace --timeout=600

docs: $(INSTALLED) $(VENV)/.group-docs  ## build the documentation into build/docs, with the notebooks as they were last run
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

zoo: $(INSTALLED)  ## train the models that ship again, from nothing
	$(RUN) -m experiments.train configs/zoo.toml

bench: $(INSTALLED)  ## where each millisecond of decoding goes; fails where a bar is missed
	$(RUN) -m experiments.bench

kernels: $(KERNELS)/.installed  ## compile the GPU and TPU kernels ahead of time, without a device
	JAX_PLATFORMS=cpu $(KERNELS)/bin/python -m experiments.kernels

shapes: $(KERNELS)/.installed  ## compile the hub's models that the configs name for a TPU, without weights or a device
	JAX_PLATFORMS=cpu $(KERNELS)/bin/python -m experiments.shapes

device: $(INSTALLED)  ## on a GPU or TPU: check and time the kernels
	$(RUN) -m experiments.device

clean:  ## remove the environment and caches; results in runs/ stay
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(RUN) -m pip --version >/dev/null 2>&1 || { \
	  for python in $(or $(PYTHON),$(CANDIDATES)) none; do \
	    "$$python" -c '$(PROBE)' >/dev/null 2>&1 && break; \
	  done; \
	  if [ "$$python" = none ]; then echo '$(NO_PYTHON)' >&2; exit 1; fi; \
	  echo "Making $(VENV) with $$("$$python" --version); the first install takes a few minutes."; \
	  "$$python" -m venv --clear $(VENV); \
	}
	@$(INSTALL) 'pip>=25.1'  # the first that knows dependency groups
	$(INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.group-%: $(INSTALLED)
	$(INSTALL) --group $*
	@touch $@

$(KERNELS)/.installed: pyproject.toml constraints.txt | $(INSTALLED)
	$(RUN) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[tpu]' jax-cuda13-plugin==$(JAX_VERSION) jax-cuda13-pjrt==$(JAX_VERSION) absl-py flatbuffers
	@touch $@
