# Two commands on a fresh machine with Python (3.10 or newer), make and a C++ compiler:
#
#   make demo    train a small model on 8192 tokens at a time, beside gradient checkpointing; results in out/
#   make test    the tests
#
# Another Python: make demo PYTHON=python3.12

PYTHON ?= python3
TORCH ?= 2.13.0
PIP_ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/installed

.PHONY: venv demo test lint clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("streambp_compile needs Python 3.10 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(PIP_ARGS) torch==$(TORCH)
	$(RUN) -m pip install --quiet $(PIP_ARGS) -e '.[test,examples]'
	@touch $(STAMP)

demo: venv
	$(RUN) examples/long_context.py

test: venv
	$(RUN) -m pytest -q tests

lint: venv
	@$(RUN) -m ruff --version >/dev/null 2>&1 || $(RUN) -m pip install --quiet $(PIP_ARGS) ruff
	$(RUN) -m ruff check .

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
