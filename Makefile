# make run   the main job: FedProto, 20 clients, four architectures, handwritten digits, 20 rounds; then each client alone
# make test  format, lint, types and tests
# make test-long  more tests of real processes, some of which wait minutes for Flower
# make test-newest-flower  tests of messages, grid and engines on the newest Flower that installs, in .venv-newest
# make test-lowest  tests on the lowest versions that pyproject.toml allows, in .venv-lowest
# make keys  the keys in pyproject.toml and the rules in docs/privacy.md, from their declarations
# make docs  the documentation as a site in docs/_build/html; fails on a link that leads nowhere
# Needs Python 3.11 or newer and make; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NEWEST := .venv-newest
LOWEST := .venv-lowest
LOWEST_TESTS := tests/config tests/runs tests/sinks tests/data/own tests/test_cli.py tests/flower/engines/test_local.py \
	tests/experiments/test_pictures.py tests/experiments/test_statistics.py tests/prototypes/test_class_means.py \
	tests/methods/test_on_a_card.py tests/test_extras.py

.PHONY: install run test test-long test-newest-flower test-lowest lint format keys docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]} is too old: 3.11 or newer is needed, e.g. make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[test]'
	touch $@

run: install
	$(BIN)/pbfl run fedproto-digits
	@echo; echo "The same clients, each training alone:"
	$(BIN)/pbfl run fedproto-digits --set method=local

test: lint
	$(BIN)/python -m pytest --numprocesses=3 --dist=worksteal --durations=12

test-long: install
	$(BIN)/python -m pytest -m long

# The two environments below have everything anew, torch too: nothing on their paths belongs to another environment, so
# no installer can reach into one.
$(NEWEST)/.installed: pyproject.toml | $(STAMP)
	$(BIN)/python -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet -e '.[test]'
	touch $@

test-newest-flower: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pip list | grep -E '^(flwr|ray) '
	$(NEWEST)/bin/python -m pytest tests/flower/engines tests/flower/messages tests/flower/test_flower_version.py

$(LOWEST)/.installed: pyproject.toml | $(STAMP)
	$(BIN)/python -m venv --clear $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --link-mode copy --resolution lowest-direct \
		-e '.[test,parquet,flwr-datasets,tensorboard,wandb,mlflow,prometheus]'
	touch $@

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/pbfl run fedproto-digits --set num-server-rounds=2 --run-dir $(LOWEST)/run-$$$$
	$(LOWEST)/bin/python -m pytest --numprocesses=3 --dist=worksteal $(LOWEST_TESTS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/deptry pbfl_flwr client_app server_app
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

keys: install
	$(BIN)/python docs/keys.py

docs: install
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) $(NEWEST) $(LOWEST) docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
