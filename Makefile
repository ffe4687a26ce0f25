# The commands of this repository. Each does everything it needs on a machine with Python 3.11 and pip.
#   make train [ARGS="--workers 2 --steps 100"]   set up .venv, then run `dlion train`
#   make test  [ARGS="-k codecs"]                 set up .venv, then run the core tests
#   make test-all [ARGS="-k accelerate"]          the same, then all other tests: of real processes, slow ones, and, with more
#                                                 packages, of integrations and of the site
#   make check                                    set up .venv, then run ruff and mypy
#   make sanitize [ARGS="45 7"]                   fuzz the C++ kernels under AddressSanitizer and UBSan (seconds, seed)
#   make docs                                     set up .venv, then build the documentation site: build/site/index.html
#   make wheel                                    build the wheel and the source distribution, in dist
#   make smoke                                    the same, and train with that wheel where there is nothing but torch
#   make bench [ARGS="--only 100mbit"]            measure on emulated links (root, iproute2), make the tables of the docs
#   make clean                                    remove .venv and caches (never runs/)
# PYTHON=/path/to/python picks the interpreter; TORCH=... another requirement than the pinned one.

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=

# A TORCH that was not asked for never replaces the one that is installed already.
ASKED_TORCH := $(if $(filter file,$(origin TORCH)),,$(TORCH))
export PYTHON TORCH ASKED_TORCH

.PHONY: train test test-all core-tests-ready check sanitize wheel smoke bench docs clean setup

train: setup
	@.venv/bin/dlion train $(ARGS)

# $(call installed,NAME,WHO,FLAGS): install requirements/NAME.txt into .venv, unless it is there already.
define installed
	@cmp -s requirements/$(1).txt .venv/$(1).txt || { \
		.venv/bin/python -m pip install --quiet $(3) -r requirements/$(1).txt && \
		cp requirements/$(1).txt .venv/$(1).txt; } || { \
		echo "make: $(2) need requirements/$(1).txt, and pip failed: see above" >&2; exit 1; }
endef

# What `make test` runs; tests/core.py holds these tests to it. Another -m in ARGS takes the place of this one.
CORE := -m "not processes and not slow"
REST := -m "processes or slow"

test: core-tests-ready
	@.venv/bin/python -m pytest -n 2 --dist worksteal $(CORE) $(ARGS)

# $(call some,OPTIONS): these tests; status 5: ARGS choose none among them.
define some
	@.venv/bin/python -m pytest -n 2 $(1) $(ARGS) $(if $(ARGS),|| [ $$? -eq 5 ])
endef

# Integrations by themselves, a file in one process: so frameworks are imported once and forked, and what a file shares is
# made once.
test-all: core-tests-ready
	$(call some,--dist worksteal $(CORE))
	$(call some,--dist worksteal $(REST))
	$(call installed,integrations,the tests of integrations)
	$(call installed,torchtitan,the tests of torchtitan,--no-deps)
	$(call installed,docs,the documents)
	$(call some,--dist loadfile tests/integrations)
	$(call installed,triton,the tests of GPU kernels)
	$(call some,--dist loadfile tests/gpu)

core-tests-ready: setup
	$(call installed,hf,the tests of recipes)
	$(call installed,elastic,the tests of elastic workers)

# All three have their say, even when the first finds fault.
check: setup
	@status=0; for tool in "ruff check ." "ruff format --check ." "mypy"; do \
		echo "$$tool"; .venv/bin/$$tool || status=1; \
	done; exit $$status

# cmake comes from the system or, as for an installation, from a package.
sanitize: setup
	@command -v cmake >/dev/null || .venv/bin/python -m pip install --quiet cmake ninja
	@PATH="$$PATH:$(CURDIR)/.venv/bin"; cmake -S . -B build/sanitize -DDLION_SANITIZE=ON >/dev/null && \
		cmake --build build/sanitize && build/sanitize/fuzz_kernels $(or $(ARGS),45)

wheel:
	@sh scripts/wheel.sh dist

smoke: wheel
	@sh scripts/smoke.sh dist

# Status 77: skipped, with a line that says what is missing. That is no failure.
bench: setup
	@.venv/bin/python bench/network.py --docs docs/benchmarks.md $(ARGS) || [ $$? -eq 77 ]
	@.venv/bin/python bench/plan_table.py --docs docs/plan.md

docs: setup
	$(call installed,docs,the documents)
	@.venv/bin/python scripts/build_site.py

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup:
	@sh scripts/setup.sh
