# Everything is installed into .venv and runs from there.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo test lint docs serve clean

install: $(STAMP)

$(STAMP): $(wildcard requirements/*.txt) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt -r requirements/frameworks.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The example agent on two real engines, with reuse and without.
demo: install
	$(BIN)/python examples/demo.py $(ARGS)

# Those without engines four at a time (many of them wait), then those with. All of them run, whichever fail; the exit
# status tells. Some: make test TEST_ARGS="tests/unit -x"
test: install
	scripts/test-tools.sh
ifdef TEST_ARGS
	$(BIN)/python -m pytest $(TEST_ARGS)
else
	@failed=0; \
	$(BIN)/python -m pytest -n 4 --dist loadgroup tests/packaging tests/unit tests/clients tests/router tests/dashboard \
		tests/deploy || failed=1; \
	$(BIN)/python -m pytest tests/engine || failed=1; \
	$(BIN)/python -m pytest tests/hosts || failed=1; \
	exit $$failed
endif

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation's pages, into site/. For all links to work, open them through a server:
# .venv/bin/mkdocs serve
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# make serve ARGS="--port 9000"
serve: install
	$(BIN)/carryback serve $(ARGS)

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
