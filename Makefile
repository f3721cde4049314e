# make demo   set everything up and run the main job on this machine, no cluster needed
# make test   everything that can run here; says what it needs for the rest
# make check  the fast part: lint, types, import contracts, unit and property tests
# make bench  measurements beside the tools one would use instead
# make cluster        a real Kubernetes with the training operator, on this machine; prints what to export
# make cluster-down   its end

VENV   := .venv
BIN    := $(VENV)/bin
# The first Python that is new enough; name another by `make PYTHON=/path/to/python`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check lint bench cluster cluster-down goldens docs clean system-packages
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo
	$(BIN)/k8sjob run --fresh manifests/digits-ddp/job.yaml

test: lint system-packages
	$(BIN)/python -m pytest --durations=10 -n 2 --no-loadscope-reorder

check: lint
	$(BIN)/python -m pytest -q -m "not dist and not system and not cluster and not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py

# Goldens are the examples themselves; look at the difference before you commit it.
goldens: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/golden --regenerate

# Pages that are written from the code: the spec, the command line, files that pages show.
docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_shown.py
	$(BIN)/python docs/generate_architecture.py

cluster: $(VENV)/.dev system-packages
	@cd tests && ../$(BIN)/python -m cluster.bed up

cluster-down: | $(BIN)/python
	@cd tests && ../$(BIN)/python -m cluster.bed down

# What only root on Debian can have: image builds and a cluster. Others are told by the tests that are skipped.
SYSTEM := buildah gcc libc6-dev debootstrap skopeo containerd runc containernetworking-plugins docker-registry \
	iproute2 iptables conntrack openssl util-linux ca-certificates
system-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		for p in $(SYSTEM); do dpkg-query -Wf'$${db:Status-Status}' $$p 2>/dev/null | grep -qx installed || missing="$$missing $$p"; done; \
		if [ -n "$$missing" ]; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; fi; fi

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "k8sjob needs Python 3.11 or newer with its venv module (on Debian: apt install python3-venv)" >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade "pip>=25.1"

$(VENV)/.demo: pyproject.toml manifests/digits-ddp/requirements.txt | $(BIN)/python
	@echo "Installing k8sjob and torch into $(VENV); the first time takes a few minutes."
	$(BIN)/pip install -q -e '.[torch]' -r manifests/digits-ddp/requirements.txt
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.demo
	$(BIN)/pip install -q --group dev
	@touch $@

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
