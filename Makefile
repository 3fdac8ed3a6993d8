# On a fresh machine with Python (3.10 or newer), make and a C++ compiler:
#
#   make demo         one step on 8192 tokens beside gradient checkpointing, then training; results in out/
#   make demo QUICK=1 the same on 2048 tokens
#   make test         the tests; chunk bodies mostly run node by node, most whole models wait for test-compiled
#   make test-long    tests of several seconds each
#   make test-quick   some of every module
#   make test-compiled   whole models, with chunk bodies that Inductor compiles
#   make test-all     all tests, the slow ones too; chunk bodies of whole models are compiled
#   make lint         formatting and static checks
#
#   make dist         a wheel and a source archive, in dist/
#   make test-dist    installs the wheel beside torch alone, in an environment of its own, and streams a first model
#   make docs         the pages of docs/ and the API as a site, in out/site; a warning is an error
#
#   make test-trainers   the tests with PEFT, Accelerate, TRL, Lightning and DeepSpeed, in an environment of their own
#
# And, with neither a GPU nor CUDA installed (docs/testing-without-a-gpu.md):
#
#   make test-cuda    compiles ten architectures for an H200 and an A100; downloads a CUDA build of torch, about 3 GB
#   make test-oldest  the tests of make test, on a CPU, with that build: the oldest torch that is supported
#
# Another Python: make demo PYTHON=python3.12. Tests run in two processes; more: make test JOBS=8

PYTHON ?= python3
TORCH ?= 2.13.0
TORCH_CUDA ?= 2.11.0
PIP_ARGS ?=
JOBS ?= 2
QUICK ?=
PIP_ARGS_CUDA ?=
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/installed

VENV_CUDA := .venv-cuda
VENV_BARE := .venv-bare
VENV_TRAINERS := .venv-trainers
RUN_TRAINERS := $(VENV_TRAINERS)/bin/python
STAMP_TRAINERS := $(VENV_TRAINERS)/installed
RUN_CUDA := $(VENV_CUDA)/bin/python-gpu
STRUCTURES := out/structures

.PHONY: venv demo test test-long test-quick test-compiled test-all test-cuda test-oldest test-trainers dist test-dist docs lint types clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("streambp_compile needs Python 3.10 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(PIP_ARGS) torch==$(TORCH)
	$(RUN) -m pip install --quiet $(PIP_ARGS) -e '.[test,examples]'
	@touch $(STAMP)

demo: venv
	$(RUN) examples/long_context.py $(if $(QUICK),--quick)

PYTEST_ARGS = -m pytest -q -n $(JOBS) --dist worksteal
PYTEST = $(RUN) $(PYTEST_ARGS)
BELONGS = not slow and (inductor or quick or not models)
DEFAULT_TESTS = -m "$(BELONGS) and not long" tests

test: venv
	$(PYTEST) $(DEFAULT_TESTS)

test-long: venv
	$(PYTEST) -m "$(BELONGS) and long" tests

test-quick: venv
	$(PYTEST) -m "quick and not slow and not long" tests

test-compiled: venv
	$(PYTEST) --inductor -m "models and not inductor and not slow" tests

test-all: venv
	$(PYTEST) -m "inductor or not models" tests
	$(PYTEST) --inductor -m "models and not inductor" tests

$(RUN_CUDA): pyproject.toml tests/cuda/build tests/cuda/pretend_gpu.c
	test -x $(VENV_CUDA)/bin/python || $(PYTHON) -m venv $(VENV_CUDA)
	$(VENV_CUDA)/bin/python -m pip install --quiet $(PIP_ARGS_CUDA) torch==$(TORCH_CUDA)
	$(VENV_CUDA)/bin/python -m pip install --quiet $(PIP_ARGS_CUDA) -e '.[test]'
	tests/cuda/build $(VENV_CUDA)

# What both CPUs report, and then that a GPU's report is the same, for every GPU that we can pretend to have.
test-cuda: venv $(RUN_CUDA)
	rm -rf $(STRUCTURES)
	$(RUN) tests/cuda/architectures.py $(STRUCTURES)
	$(VENV_CUDA)/bin/python tests/cuda/architectures.py $(STRUCTURES)
	PRETEND_GPU=h200 $(RUN_CUDA) -m pytest -q tests/cuda
	PRETEND_GPU=a100 $(RUN_CUDA) -m pytest -q tests/cuda

test-oldest: $(RUN_CUDA)
	$(VENV_CUDA)/bin/python $(PYTEST_ARGS) $(DEFAULT_TESTS)

$(STAMP_TRAINERS): pyproject.toml
	test -x $(RUN_TRAINERS) || $(PYTHON) -m venv $(VENV_TRAINERS)
	$(RUN_TRAINERS) -m pip install --quiet $(PIP_ARGS) torch==$(TORCH)
	$(RUN_TRAINERS) -m pip install --quiet $(PIP_ARGS) -e '.[test,trainers]'
	@touch $(STAMP_TRAINERS)

test-trainers: $(STAMP_TRAINERS)
	$(RUN_TRAINERS) -m pytest -q tests/trainers tests/test_trl.py tests/test_recipes.py

dist: venv
	rm -rf dist build *.egg-info
	$(RUN) -m pip install --quiet $(PIP_ARGS) -e '.[dist]'
	$(RUN) -m build --outdir dist > /dev/null
	$(RUN) .ci/check_dist.py

# Outside of the checkout, so that nothing of it can be imported.
test-dist: dist
	$(PYTHON) -m venv --clear $(VENV_BARE)
	$(VENV_BARE)/bin/python -m pip install --quiet $(PIP_ARGS) torch==$(TORCH) dist/*.whl
	cd dist && ../$(VENV_BARE)/bin/python -m streambp_compile.doctor

docs: venv
	$(RUN) -m pip install --quiet $(PIP_ARGS) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

lint: venv
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

types: venv
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) $(VENV_CUDA) $(VENV_BARE) $(VENV_TRAINERS) out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
