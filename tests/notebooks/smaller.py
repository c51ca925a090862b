"""Smaller settings of notebooks for `make test-real`, which runs each of them once: text of a cell -> its substitute.

What the notebooks and `CHECKS` assert must hold with them too. `make test-all` runs the notebooks as they are.
"""

# Starting vLLM takes a minute each time; its engines and servers have tests of their own.
WITHOUT_VLLM = {'HAVE_VLLM = importlib.util.find_spec("vllm") is not None': "HAVE_VLLM = False"}

SMALLER = {
    "05_engines": WITHOUT_VLLM,
    "08_algorithms": {"range(SEED, SEED + 3)": "range(SEED, SEED + 1)"},
    "10_code": {"tasks.test[:128]": "tasks.test[:48]"},
    "11_sql": {"tasks.test[:128]": "tasks.test[:64]"},
    "12_search": {"tasks.test[:100]": "tasks.test[:50]"},
    "13_webshop": {"tasks.test[:100]": "tasks.test[:50]"},
    "14_alfworld": {"tasks.test[:96]": "tasks.test[:48]", "tasks.test[:64]": "tasks.test[:16]"},
    "16_any_agent": {"data.test[:64]": "data.test[:32]"},
    "18_imitate_and_distil": {"tasks.test[:200]": "tasks.test[:64]"},
    "21_real_model": {
        "tasks.test[:32]": "tasks.test[:4]",
        "tasks.train[:160]": "tasks.train[:24]",
        "tasks.test)": "tasks.test[:8])",
        "steps=36, tasks_per_step=16": "steps=2, tasks_per_step=4",
        "not a.reward and b.reward and a.tool_calls": "a.turns",
    },
    "22_masksearch": {"data.test[:100]": "data.test[:50]"},
    "25_tools_as_weights": {"for i in range(4):\n    _, curve": "for i in range(2):\n    _, curve"},
    "31_servers": WITHOUT_VLLM,
    "34_coding_agent": {
        "steps=240, batch=16": "steps=120, batch=16",
        "(coder, repairs.test)": "(coder, repairs.test[:6])",
        "steps=6, tasks_per_step=8": "steps=2, tasks_per_step=2",
        "assert after.success >= before.success + 0.2": "assert len(run.records) == 2",
    },
    "35_trl": {  # a shipped policy and its tasks, which need no other model
        "load(MODEL, lora=16)": 'load(af.tiny.policy().save("runs/tiny"), lora=16)',
        'load_tasks("word_problems")': 'load_tasks("calculator")',
        'task.fields["expression"]': 'task.messages[-1]["content"][len("What is ") : -1]',
    },
}
