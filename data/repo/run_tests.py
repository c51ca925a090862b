"""Runs the functions test_... of tests/test_*.py: `python run_tests.py [module ...]`. Needs nothing but Python."""

import importlib.util
import pathlib
import sys
import traceback

sys.dont_write_bytecode = True
here = pathlib.Path(__file__).parent
sys.path.insert(0, str(here))
failed = ran = 0
for path in sorted(here.glob("tests/test_*.py")):
    name = path.stem.removeprefix("test_")
    if sys.argv[1:] and name not in sys.argv[1:]:
        continue
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tests = {key: value for key, value in vars(module).items() if key.startswith("test_")}
    except Exception:
        tests = {"import": lambda: (_ for _ in ()).throw(ImportError(traceback.format_exc(limit=-1)))}
    for key, test in tests.items():
        ran += 1
        try:
            test()
        except Exception as error:
            failed += 1
            frames = traceback.extract_tb(error.__traceback__)
            shown = next((frame for frame in frames if frame.filename == str(path)), frames[-1])
            sys.stdout.write(f"FAILED {path.name}::{key}, line {shown.lineno}: {shown.line}\n")
            sys.stdout.write(f"  {type(error).__name__}: {error}\n" if str(error) else f"  {type(error).__name__}\n")
sys.stdout.write(f"{ran - failed} passed, {failed} failed\n")
sys.exit(1 if failed else 0)
