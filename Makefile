# Every target runs what it needs first; `make install` is instant until pyproject.toml or the constraints change.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test budget bench torture lint

# Without it, `python -m` would put this folder on sys.path and make `import kvstore` work here and nowhere else.
export PYTHONSAFEPATH := 1

# Traces are not part of the project: a sibling folder `shared` is used when nothing else is named.
ifeq ($(origin DUOKV_DATA),undefined)
ifneq ($(wildcard ../shared/.),)
export DUOKV_DATA := $(abspath ../shared)
endif
endif

PYTHON ?= python3
BIN := .venv/bin
# The name carries the digest of what was installed, so a changed input is a missing file.
STAMP := .venv/installed-$(shell cat pyproject.toml constraints-cpu.txt | sha256sum | cut -c1-16)
PACKAGES := $(patsubst %/py.typed,%,$(wildcard */py.typed))
# Two workers suit the smallest machine (two cores) that runs the tests.
PYTEST := $(BIN)/pytest -q -n 2

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with everything but the gpu extra

$(STAMP): pyproject.toml constraints-cpu.txt
	@echo "installing duokv into .venv (about a minute) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check --no-compile -c constraints-cpu.txt -e '.[tools,remote,engine,pretrained,dev]'
	@rm -f .venv/installed-*
	@touch $@

demo: $(STAMP) ## show what it does: TRACE=file, FULL=1, LIMIT=requests, FILE=text to talk about
	@$(BIN)/python -m duokv.tools.demo \
		$(if $(TRACE),--trace '$(TRACE)') $(if $(FULL),--full) $(if $(LIMIT),--limit '$(LIMIT)') $(if $(FILE),--file '$(FILE)')

test: $(STAMP) ## run the tests, without torture, bench and gpu
	@$(PYTEST)

torture: $(STAMP) ## run the long random tests (minutes)
	@$(PYTEST) -m torture --hypothesis-profile torture

budget: $(STAMP) ## compare what operations cost, in multiples of a plain way to do them, with bench/budget.json
	@$(BIN)/python -m duokv.bench.scale --check bench/budget.json

bench: $(STAMP) ## measure speed into bench/RESULTS.md (a quarter of an hour), then hit rates; PEERS='NAME=PYTHON ...' adds peers
	@$(BIN)/python -m duokv.bench.results bench/RESULTS.md $(addprefix --env ,$(PEERS))
	@$(BIN)/python -m duokv.bench.table

lint: $(STAMP) ## check style and types
	@mkdir -p .typing/duokv
	@for package in $(PACKAGES); do ln -sfn "../../$$package" ".typing/duokv/$$package"; done
	@failed=; \
	for check in 'ruff check --quiet' 'ruff format --check --quiet' mypy; do \
		$(BIN)/$$check || failed+=" $$check;"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed see above" >&2; exit 1; }
