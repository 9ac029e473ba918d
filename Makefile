# `make demo` and `make test` set up all they need in .venv; a second run sets nothing up again.
#
#   make test ARGS="-k layout"        arguments for pytest
#   make demo ARGS="task=sort"         arguments for the script
#   make demo ARGS="loss=sft"          supervised fine-tuning instead of GRPO
#   make benchmark ARGS="--quick"     arguments for the benchmark
#   make test JOBS=1                  tests in one process (otherwise 3, or 2 for test-all), each with a Ray of its own
#   make test PYTHON=python3.12       another Python for the set-up

VENV    := .venv
PY      := $(VENV)/bin/python
READY   := $(VENV)/.ready
PIP     := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
VLLM    := .venv-vllm
VLLM_PY := $(VLLM)/bin/python
VLLM_READY := $(VLLM)/.ready
VLLM_PIP := $(PY) -m pip --python $(VLLM_PY) install --quiet --disable-pip-version-check
ARGS    ?=
# Tests of `make test` wait more often than the long runs of `make test-all`, which keep two cores busy by themselves.
JOBS    ?= $(if $(filter test-all,$(MAKECMDGOALS)),2,3)
PYTHON  ?=

export RAY_USAGE_STATS_ENABLED := 0
export OMP_NUM_THREADS ?= 1

.PHONY: help setup setup-vllm demo test test-all test-vllm test-device test-gpu lint format docs chaos benchmark clean

help:
	@echo 'make demo        GRPO teaches a small language model, on three workers (about a minute)'
	@echo 'make test        lint, types and tests (about nine minutes on two cores)'
	@echo 'make test-all    what make test leaves out as well: the demo in four ways, chaos, hosts, notebooks, deep properties'
	@echo 'make test-vllm   the tests of VLLMEngine, in an environment of their own; test-all includes them'
	@echo 'make test-device the tests of device code on a simulated CUDA device, which needs a C++ compiler'
	@echo 'make test-gpu    the tests of device code on the GPUs of this machine; refuses where there is none'
	@echo 'make lint        ruff and mypy alone'
	@echo 'make format      let ruff repair and format the sources'
	@echo 'make docs        build the documentation into site/, and fail on dead links'
	@echo 'make chaos       kill processes and hosts at random moments, and print how they recover (half an hour)'
	@echo 'make benchmark   this library beside plain Ray, verl and Monarch (over an hour, an idle machine and 20 GB)'
	@echo 'make setup       only make $(VENV), as the targets above do when they need it'
	@echo 'make setup-vllm  only make $(VLLM), for rollout workers with VLLMEngine'
	@echo 'make clean       remove what the targets above have made, $(VENV) included'

setup: $(READY)

setup-vllm: $(VLLM_READY)

# `make demo ARGS="engine=vllm"` makes vLLM's environment on first use.
demo: $(READY) $(if $(findstring engine=vllm,$(ARGS)),$(VLLM_READY))
	@$(PY) tutorials/$(if $(findstring loss=sft,$(ARGS)),train_sft,train_grpo).py $(ARGS)

test: lint
	@$(PY) -m pytest -n $(JOBS) $(ARGS)

test-all: lint $(VLLM_READY)
	@$(MAKE) --no-print-directory test-vllm; vllm=$$?; $(PY) -m pytest -n $(JOBS) --full $(ARGS) && exit $$vllm

test-vllm: $(VLLM_READY)
	@$(VLLM_PY) -m pytest -n $(JOBS) --full tests/with_vllm $(ARGS)

# ARGS="tests/train" runs other tests on the simulated device.
test-device: $(READY)
	@$(PY) tests/simdevice/build.py
	@SIMDEVICE=1 PYTHONPATH="tests/simdevice/boot:$(CURDIR)" $(PY) -m pytest $(or $(ARGS),$(shell cat tests/simdevice/files.txt))

# TEST_GPUS tells the tests how many devices there are. ARGS="tests/train" runs other tests on the GPUs.
test-gpu: $(READY)
	@TEST_GPUS=$$($(PY) -c 'import torch; print(torch.accelerator.device_count())') && if [ "$$TEST_GPUS" = 0 ]; then \
	    echo 'make test-gpu: torch sees no GPU on this machine; make test-device simulates one' >&2; exit 2; \
	fi && export TEST_GPUS && \
	$(PY) -m pytest $(or $(ARGS),tests/simdevice/on_device) && $(PY) -m pytest -m gpu $(or $(ARGS),tests)

lint: $(READY)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy --num-workers 2

format: $(READY)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

chaos: $(READY)
	@$(PY) tests/recovery --rounds 280 $(ARGS)

benchmark: $(READY)
	@$(PY) -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM) site benchmarks/.venvs benchmarks/out tutorials/out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find dispatch single_controller workers tests tutorials benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last and removed first, so an interrupted installation never counts as done: the
# next run begins it anew in an empty environment. A complete one is brought up to date in place.
$(READY): pyproject.toml constraints.txt
	@if [ -f $@ ] && $(PY) -c '' 2>/dev/null; then \
	    rm -f $@; \
	else \
	    rm -f $@; found=; \
	    for python in $(or $(PYTHON),python3.11 python3 python3.12 python3.13); do \
	        "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	            && found="$$python" && break; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo 'No Python 3.11, 3.12 or 3.13 found: install one, or name it with `make PYTHON=/path/to/python`.' >&2; \
	        exit 1; \
	    fi; \
	    echo "Making $(VENV) with $$("$$found" --version); this takes a few minutes, once."; \
	    "$$found" -m venv --clear $(VENV) >/dev/null 2>&1 \
	        || { "$$found" -m venv --clear --without-pip $(VENV) \
	             && "$$found" -m pip --quiet --disable-pip-version-check --python $(PY) install pip; } \
	        || exit 1; \
	fi
	@$(PIP) torch
	@$(PIP) --editable '.[dev,all,docs]'
	@touch $@

# vLLM wants other versions of numpy and transformers than the rest, so it has an environment of its own, with the same
# Python. The stamp is as above. $(PY)'s pip installs there, because --without-pip makes an environment on any system.
$(VLLM_READY): constraints-vllm.txt | $(READY)
	@if [ -f $@ ] && $(VLLM_PY) -c '' 2>/dev/null; then \
	    rm -f $@; \
	else \
	    rm -f $@; \
	    echo 'Making $(VLLM) with vLLM: two to five minutes, 600 MB of downloads and 2.4 GB on disk, once.'; \
	    $(PY) -m venv --clear --without-pip $(VLLM); \
	fi
	@$(VLLM_PIP) --constraint constraints-vllm.txt torch
	@$(VLLM_PIP) --no-deps --requirement constraints-vllm.txt
	@$(VLLM_PIP) --no-deps --editable .
	@touch $@
