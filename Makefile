# make demo   set everything up and run the main job on this machine, no cluster needed
# make test   the whole program once, in ten minutes on two cores; needs only Python and make
# make check  the fast part of it: lint, types, import contracts, unit and property tests
# make test-dist     every strategy and shape in several processes of torch, and all examples of the properties
# make test-image    images built and pushed for real; needs root on Debian (installs buildah, skopeo ...)
# make test-cluster  a real Kubernetes; needs root on Debian and Go, or KUBECONFIG and K8SJOB_TEST_REGISTRY
# make test-chaos    what kills processes and stops parts of a cluster; needs root on Debian and Go
# make test-s3       records in a bucket, on a server with S3's interface; installs it
# make test-all      all of these
# make docs-site  the documentation as a searchable site, in site/
# make bench  a table of commands beside the tools one would use instead, in ten minutes
# make bench-growth  how the CPU seconds of commands grow with jobs, replicas, lines and files
# make release  the packages in dist/, checked by an install in empty environments; see CONTRIBUTING.md
# make publish  the same, then the tag, the image and the packages, for all; see CONTRIBUTING.md
# make cluster        a real Kubernetes with the training operator, on this machine; prints what to export
# make cluster-down   its end

VENV   := .venv
BIN    := $(VENV)/bin
# The first Python that is new enough; name another by `make PYTHON=/path/to/python`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Else each of thousands of processes compiles k8sjob again: 0.2 s of a processor.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check test-dist test-image test-cluster test-chaos test-s3 test-rest test-all cluster-built controllers-built lint bench bench-growth cluster cluster-down goldens docs docs-site release publish clean system-packages
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo
	$(BIN)/k8sjob run --fresh manifests/digits-ddp/job.yaml

# A test without a mark is fast and needs nothing; pyproject.toml describes the marks.
SPECIAL   := system or cluster or chaos
MARKED    := dist or slow or $(SPECIAL)
PYTEST    := $(BIN)/python -m pytest -q --durations=10
# Many tests mostly wait, so that two cores have enough for three processes.
PARALLEL  := -n 3 --no-loadscope-reorder
ALL       := --hypothesis-profile=full

test: lint
	$(PYTEST) $(PARALLEL) -m "essential or not ($(MARKED))"

check: lint
	$(PYTEST) $(PARALLEL) -m "not ($(MARKED))"

test-dist: $(VENV)/.dev
	$(PYTEST) $(PARALLEL) $(ALL) -m "(dist or slow or property) and not ($(SPECIAL))"

test-image: $(VENV)/.dev system-packages
	@$(BIN)/python tests/needs.py image
	$(PYTEST) $(PARALLEL) -m "system"

test-cluster: controllers-built
	$(PYTEST) $(PARALLEL) -m "cluster and not chaos"

test-chaos: controllers-built
	@$(BIN)/python tests/needs.py chaos
	$(PYTEST) -m "chaos"

test-s3: $(VENV)-s3/.done
	$(VENV)-s3/bin/python -m pytest -q tests/cli/test_buckets.py

# What test-all has besides test; the tests of what is missing here are skipped.
test-rest: $(VENV)/.dev system-packages
	-@$(BIN)/python tests/needs.py image chaos
	-@$(MAKE) --no-print-directory cluster-built
	$(PYTEST) $(PARALLEL) $(ALL) -m "($(MARKED) or property) and not essential"

test-all: test test-rest test-s3

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py

bench-growth: $(VENV)/.dev
	$(BIN)/python bench/run.py growth

# Goldens are the examples themselves; look at the difference before you commit it.
goldens: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/golden --regenerate

# Pages that are written from the code: the spec, the command line, ids, files that pages show.
docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_findings.py
	$(BIN)/python docs/generate_shown.py
	$(BIN)/python docs/generate_architecture.py
	$(BIN)/python docs/generate_picture.py

# The pages as a searchable site, in site/; needs no network.
docs-site: $(VENV)/.dev
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site docs site
	@echo "open site/index.html"

release: $(VENV)/.dev
	rm -rf dist
	$(BIN)/uv build -q
	$(BIN)/python packaging/krew.py dist/krew "$${K8SJOB_REPOSITORY:-https://host.example/owner/k8sjob}"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python packaging/check.py dist

publish: $(VENV)/.dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python packaging/publish.py $(ARGS)

cluster: $(VENV)/.dev system-packages
	@cd tests && ../$(BIN)/python -m cluster.bed up

# What a cluster is made of, once: Kubernetes and the operator from source, in about a quarter of an hour.
cluster-built: $(VENV)/.dev system-packages
	@$(BIN)/python tests/needs.py cluster
	@if [ -z "$$KUBECONFIG" ] || [ -z "$$K8SJOB_TEST_REGISTRY" ]; then cd tests && ../$(BIN)/python -m cluster.bed build; fi

# JobSet, Kubeflow Trainer and Kueue, which a few tests need and would build themselves: five minutes.
controllers-built: cluster-built
	@if [ -z "$$KUBECONFIG" ] || [ -z "$$K8SJOB_TEST_REGISTRY" ]; then cd tests && ../$(BIN)/python -m cluster.bed controllers; fi

cluster-down: | $(BIN)/python
	@cd tests && ../$(BIN)/python -m cluster.bed down

# What only root on Debian can have: image builds and a cluster. tests/needs.py tells others what is missing.
SYSTEM := buildah gcc libc6-dev debootstrap skopeo containerd runc containernetworking-plugins docker-registry \
	iproute2 iptables conntrack openssl util-linux ca-certificates chromium chromium-driver prometheus
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
	$(BIN)/pip install -q -e '.[run]' -r manifests/digits-ddp/requirements.txt
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.demo
	$(BIN)/pip install -q --group dev
	@touch $@

$(VENV)-s3/.done: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv $(VENV)-s3
	$(VENV)-s3/bin/pip install -q --upgrade "pip>=25.1"
	$(VENV)-s3/bin/pip install -q -e '.[s3]' --group s3
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-s3 dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
