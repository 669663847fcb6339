# Each target does its own set-up: all it needs is Python 3.10 or newer with pip, and the network the first time.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
ARGS   ?=
# Tests at a time, on any machine. Most of them wait for processes: two at a time leave two cores idle half of the time.
WORKERS ?= 4
# With it each of a thousand processes that the tests start would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Frameworks with environments of their own, and all frameworks' tests. Lightning is in .venv, by the dev extra.
OWN := data deepspeed megatron mindspore nebula ray torchtitan transformers
PACKAGES_data      := torchdata==0.11.0 datasets==5.2.0
PACKAGES_deepspeed := deepspeed==0.19.8
PACKAGES_megatron  := megatron-core==0.16.1 einops psutil  # which several instances, and asynchronous saves, need
PACKAGES_mindspore := mindspore==2.10.0 aiohttp click rich xxhash
PACKAGES_nebula    := deepspeed==0.19.6  # it still has Nebula
PACKAGES_ray       := ray[train]==2.60.0
PACKAGES_torchtitan := torchtitan==0.3.0 triton  # which it imports on a CPU too
PACKAGES_transformers := transformers==5.24.0 accelerate==1.15.0 trl==1.16.0 peft==0.21.2
TESTS_data      := tests/data/test_frameworks.py
TESTS_deepspeed := tests/integrations/test_deepspeed.py
TESTS_lightning := tests/integrations/test_lightning.py tests/integrations/test_lightning_callback.py
TESTS_megatron  := tests/integrations/test_megatron.py
TESTS_mindspore := tests/provide/mindio/test_mindspore.py
TESTS_nebula    := tests/integrations/test_nebula.py tests/provide/test_torch_nebula_lightning.py
TESTS_ray       := tests/integrations/test_ray.py tests/integrations/test_ray_train.py
TESTS_torchtitan := tests/integrations/test_torchtitan.py
TESTS_transformers := tests/integrations/test_transformers.py tests/integrations/test_accelerate.py tests/integrations/test_from_pretrained.py

BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
TESTS  := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python $(TESTS)

TESTS_deepspeed    += tests/integrations/test_versions.py
TESTS_lightning    += tests/integrations/test_examples.py
TESTS_transformers += tests/integrations/test_examples.py tests/integrations/test_versions.py

# Environments with the newest releases, beside the pinned ones. MindSpore has no adapter, Nebula is a DeepSpeed of old,
# and the shim that lets Megatron-core run on a CPU fits one version.
LATEST   := $(filter-out megatron mindspore nebula,$(OWN)) lightning
unpinned  = $(foreach package,$(1),$(firstword $(subst ==, ,$(package))))
$(foreach name,$(LATEST),$(eval PACKAGES_$(name)-latest := $(call unpinned,$(or $(PACKAGES_$(name)),$(name)))))
VERSIONS := import sys; from importlib.metadata import version; names = [name.split("[")[0] for name in sys.argv[1:]]; \
  print("newest:", *(f"{name} {version(name)}" for name in names))

help:
	@echo 'make demo    train on two ranks, kill them, show that nothing is lost'
	@echo 'make drill   let faults strike real training, at chosen moments; ARGS="--full" for all of them'
	@echo 'make soak    train under random faults; MINUTES=30 for longer'
	@echo 'make test    run the tests that protect every change; ARGS="-k memory" runs some of them, WORKERS=8 more at a time'
	@echo 'make test-all    the same with the campaigns, which take long to show more; ARGS="--campaign-share=3/10" for a tenth'
	@echo 'make data, make deepspeed, make lightning, make nebula, make ray   run the tests with the real framework, which they install'
	@echo 'make transformers   the same with Hugging Face Trainer, TRL and Accelerate'
	@echo 'make torchtitan, make megatron   the same with torchtitan and Megatron-core'
	@echo 'make mindspore   the same with MindSpore, 2.8 GB'
	@echo 'make ui   run the tests of the page in Chromium; SHOTS=docs/img keeps the pictures'
	@echo 'make frameworks-latest   the tests of all adapters with the newest releases; make transformers-latest those of one'
	@echo 'make torch-matrix   the faults of docs/versions.md with each release of torch; ARGS="2.8.0" for one'
	@echo 'make check   check style, types and import rules'
	@echo 'make bench   measure saving and loading, side by side with others; ARGS="--smoke" checks in two minutes'
	@echo 'make clean   remove the virtual environment and all caches'

# torch comes first and by itself, so that TORCH, and an index given in pip's own settings, decide which build it is.
.venv/ready: pyproject.toml
	@echo 'Setting up .venv (once)'
	@$(PYTHON) -m venv .venv
	@$(PIP) install '$(TORCH)'
	@$(PIP) install -e '.[dev]'
	@touch $@

demo: .venv/ready
	@$(BIN)/python examples/demo.py $(ARGS)

drill: .venv/ready
	$(BIN)/python -m tests.faults.matrix $(or $(ARGS),--short)

soak: .venv/ready
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),5) $(ARGS)

test: .venv/ready
	$(PYTEST) $(ARGS)

test-all: .venv/ready
	$(PYTEST) -m '' $(ARGS)

$(OWN): %: .venv-%/ready
$(OWN) lightning: .venv/ready
	$(PYTEST) -m '' $(TESTS_$@) $(ARGS)

.venv-ui/ready: PACKAGES_ui := playwright==1.65.2 pillow  # with the machine's own Chromium

ui: .venv-ui/ready
	@REKINDLE_SHOTS=$(abspath $(SHOTS)) .venv-ui/bin/python -m pytest -s -m '' tests/cli/test_browser.py $(ARGS)

# It sees the packages of .venv, torch among them, so that it needs only its own. That of MindSpore has to do without torch.
.venv-%/ready: .venv/ready
	@echo 'Setting up .venv-$* (once)'
	@$(BIN)/python -m venv .venv-$*
	@$(if $(filter mindspore,$*),,cd .venv-$*/lib/python3.*/site-packages && \
	  echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python3.*/site-packages)')" >see_venv.pth)
	@.venv-$*/bin/python -m pip --disable-pip-version-check -q install $(PACKAGES_$*)
	@touch $@

# One that fails does not keep the others from being tried. Each time it looks for newer releases.
frameworks-latest:
	@$(MAKE) --no-print-directory --keep-going $(LATEST:%=%-latest)

$(LATEST:%=%-latest): %-latest: .venv-%-latest/ready
	@.venv-$@/bin/python -m pip --disable-pip-version-check -q install --upgrade $(PACKAGES_$@)
	@.venv-$@/bin/python -c '$(VERSIONS)' $(PACKAGES_$@)
	@env "REKINDLE_TEST_$$(echo $* | tr a-z A-Z)=$(CURDIR)/.venv-$@" .venv-$@/bin/python $(TESTS) -m '' $(TESTS_$*) $(ARGS)

# An environment for each release of torch, made and removed one after the other. pip's own settings decide which build it is.
torch-matrix: .venv/ready
	@$(BIN)/python -u -m tests.torch_matrix $(ARGS)

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

bench: .venv/ready
	$(BIN)/python bench $(ARGS)

clean:
	rm -rf .venv .venv-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo drill soak test test-all $(OWN) lightning frameworks-latest $(LATEST:%=%-latest) torch-matrix ui check bench clean
