"""Smaller settings of notebooks for `make test-real`, which runs each of them once: text of a cell -> its substitute.

What the notebooks and `CHECKS` assert must hold with them too. `make test-all` runs the notebooks as they are.
"""

# Starting vLLM takes a minute each time; its engines and servers have tests of their own.
WITHOUT_VLLM = {'HAVE_VLLM = importlib.util.find_spec("vllm") is not None': "HAVE_VLLM = False"}

SMALLER = {
    "05_engines": WITHOUT_VLLM,
    "08_algorithms": {"STEPS, SEEDS = 7, (0, 1, 2)": "STEPS, SEEDS = 7, (0,)"},
    "10_code": {"tasks.test[:128]": "tasks.test[:64]"},
    "31_servers": WITHOUT_VLLM,
}
