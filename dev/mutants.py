"""Mutation tests: change one place of the code in a copy, and see that the tests notice. `make test-mutants`

    python -m dev.mutants             # ten changes that no test noticed once, each with the test that does now
    python -m dev.mutants --all       # and small changes at every place of the modules that carry promises
    python -m dev.mutants --all --only metrics --most 20

A small change is another comparison, operator, number or truth value, a negated condition, or a statement left out. What
survives is listed at the end; docs/mutants.md says of each why it may.

The copy lies in a temporary folder, so that nothing is lost when this is killed. The tests run in forked processes, which
have torch and pytest already: importing them anew for every change would take most of the time.
"""

import argparse
import ast
import copy
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 300.0  # a change that makes the tests take longer is noticed by that
HEAVY = ("pytest", "torch", "numpy", "scipy.stats", "safetensors.torch")  # imported once, before the forks
PROMISES = "tests/test_promises_by_mutants.py"


class Mutant(NamedTuple):
    """One change of one file, and the tests that should notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


BY_HAND = [
    Mutant("a fit that goes on forgets its best weights", "hatrack/training/fit_loop.py",
           'self.best = {key: value.to(self.device) for key, value in groups["best"].items()}', "self.best = {}",
           f"{PROMISES} -k best_weights"),
    Mutant("states are removed before the record is written", "hatrack/experiments/run.py",
           "            record.save(folder.path.parent)\n",
           "            folder.remove_states()\n            record.save(folder.path.parent)\n",
           f"{PROMISES} -k until_the_record"),
    Mutant("old states are removed before the new one is written", "hatrack/training/checkpoint.py",
           "then: Callable[[], None]) -> None:\n    try:\n", "then: Callable[[], None]) -> None:\n    then()\n    try:\n",
           f"{PROMISES} -k until_the_next"),
    Mutant("the older of two states is used", "hatrack/training/checkpoint.py", "latest = max(found", "latest = min(found",
           f"{PROMISES} -k save_interval"),
    Mutant("probes on the example only", "hatrack/methods/guarantees.py",
           "common = [method.net.example, some.to(method.net.example)]", "common = [method.net.example]",
           f"{PROMISES} -k probed"),
    Mutant("a task that is learned again stays bound", "hatrack/methods/guarantees.py",
           "for task in method.history if task != new.index}", "for task in method.history}",
           f"{PROMISES} -k learned_again"),
    Mutant("embeddings are not clamped", "hatrack/methods/hat.py",
           "self.embeddings[self.learning].clamp_(-LIMIT, LIMIT)", "pass", f"{PROMISES} -k embeddings"),
    Mutant("the bound on free weights overflows", "hatrack/methods/parts/freeze.py", "LARGE = 1e30", "LARGE = 3e38",
           f"{PROMISES} -k overflow"),
    Mutant("fits of one task have the same seed", "hatrack/training/trainer.py",
           '"task", task.index, "fit", number)', '"task", task.index, "fit", 0)', f"{PROMISES} -k other_batches"),
    Mutant("save leaves another mode", "hatrack/methods/modes.py", "            method.train(mode)", "            pass",
           f"{PROMISES} -k leaves_the_mode"),
]  # fmt: skip
MODULES = {  # with the tests that a change in them should fail; the quickest come first
    "hatrack/methods/parts/freeze.py": "tests/methods/test_freeze.py",
    "hatrack/methods/guarantees.py": f"tests/methods/test_guarantees.py tests/methods/test_learn.py {PROMISES}",
    "hatrack/training/checkpoint.py": f"tests/training/test_checkpointer.py {PROMISES}",
    "hatrack/files/atomic.py": "tests/files/test_atomic.py tests/files/test_links.py",
    "hatrack/files/limits.py": "tests/files/test_limits.py",
    "hatrack/files/schema.py": "tests/files/test_schema.py",
    "hatrack/files/tensors.py": "tests/files/test_tensors.py",
    "hatrack/experiments/metrics.py": "tests/experiments/test_metrics.py",
    "hatrack/seeds.py": "tests/networks/test_networks.py -k seed",
}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


# Small changes


def small_changes(file: str, tests: str) -> Iterator[Mutant]:
    """Yield every small change of a file, as its whole new text."""
    text = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    for number, node in enumerate(ast.walk(tree)):
        for what, changed in _changes(node):
            fresh = copy.deepcopy(tree)
            target = next(other for k, other in enumerate(ast.walk(fresh)) if k == number)
            _replace(fresh, target, changed)
            line = getattr(node, "lineno", 0)
            yield Mutant(f"{file}:{line} {what}", file, text, ast.unparse(ast.fix_missing_locations(fresh)), tests)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a node may become, each with a few words."""
    if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        if (other := SWAPS.get(type(operator))) is not None:
            changed = copy.deepcopy(node)
            if isinstance(changed, ast.Compare):
                changed.ops[0] = other()  # type: ignore[call-overload]
            else:
                changed.op = other()  # type: ignore[assignment]
            yield f"{ast.unparse(node)} -> {ast.unparse(changed)}", changed
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        if value != node.value:  # as 1e30 + 1 is
            yield f"{node.value} -> {value}", ast.Constant(value)
    elif isinstance(node, ast.If):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield f"if {ast.unparse(node.test)} -> if not", changed
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"without {ast.unparse(node)[:60]}", ast.Pass()


def _replace(tree: ast.AST, target: ast.AST, changed: ast.AST) -> None:
    """Put another node in the place of one."""
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is target:
                setattr(parent, name, changed)
                return
            if isinstance(value, list) and any(one is target for one in value):
                value[next(k for k, one in enumerate(value) if one is target)] = changed
                return


# Running


def survives(mutant: Mutant, scratch: Path) -> bool:
    """Return whether the tests pass although a copy of the project has this change."""
    path = scratch / mutant.file
    before = path.read_text(encoding="utf-8")
    assert before.count(mutant.old) == 1, f"{mutant.name}: the place is not there, or not alone"
    path.write_text(before.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return run_tests(mutant.tests, scratch)
    finally:
        path.write_text(before, encoding="utf-8")


def run_tests(tests: str, scratch: Path, *, write_bytecode: bool = False) -> bool:
    """Return whether tests pass in the copy, within the time.

    Args:
        tests: files of tests, and after " -k " which of them.
        scratch: the copy.
        write_bytecode: keep the compiled files. The copy has them from a run without a change; a changed file has another
            time than its compiled one, so it is compiled again.
    """
    child = os.fork()
    if child == 0:
        _run_in_child(tests, scratch, write_bytecode=write_bytecode)
    deadline, status = time.monotonic() + SECONDS, None
    while status is None and time.monotonic() < deadline:
        found, code = os.waitpid(child, os.WNOHANG)
        status = code if found else None
        time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return status == 0


def _run_in_child(tests: str, scratch: Path, *, write_bytecode: bool) -> None:
    """Run tests in this process, which was forked for it, and end it with their exit code."""
    code = 1
    try:
        os.setsid()
        os.chdir(scratch)
        os.environ.update(PYTHONPATH=str(scratch), PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(scratch.parent))
        tempfile.tempdir = None  # read TMPDIR again
        sys.dont_write_bytecode = not write_bytecode
        sys.path[:] = [str(scratch), *(place for place in sys.path if place and Path(place).resolve() != ROOT.resolve())]
        for name in [name for name in sys.modules if name == "dev" or name.startswith("dev.")]:
            del sys.modules[name]
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        code = int(importlib.import_module("pytest").main(["-x", "-q", "-p", "no:cacheprovider", *_words(tests)]))
    finally:
        os._exit(code)


def _words(tests: str) -> list[str]:
    files, _, chosen = tests.partition(" -k ")
    return [*files.split(), *(["-k", chosen] if chosen else [])]


def sample(mutants: list[Mutant], most: int) -> list[Mutant]:
    """Return at most so many mutants, evenly spread and always the same; all if there are fewer, or if `most` is 0."""
    count = min(most or len(mutants), len(mutants))
    return [mutants[k * len(mutants) // count] for k in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--all", action="store_true", help="small changes of the modules that carry promises as well")
    parser.add_argument(
        "--only", default="", help="small changes of files whose path has this text only, and none of the ten"
    )
    parser.add_argument("--most", type=int, default=0, help="at most so many small changes per module, evenly spread")
    given = parser.parse_args()
    mutants = [] if given.only else list(BY_HAND)
    for file, tests in MODULES.items() if given.all else ():
        found = list(small_changes(file, tests)) if given.only in file else []
        mutants += sample(found, given.most)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "copy"
        skipped = shutil.ignore_patterns(".git", ".venv*", "site", "build", "*.egg-info", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, scratch, ignore=skipped)
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            assert run_tests(tests, scratch, write_bytecode=True), f"these tests fail without any change: {tests}"
        survivors, began = [], time.monotonic()
        for mutant in mutants:
            survived = survives(mutant, scratch)
            survivors += [mutant.name] if survived else []
            print(f"{'SURVIVED' if survived else 'noticed '} {mutant.name}", flush=True)
        print(f"{time.monotonic() - began:.0f} s for {len(mutants)} changes")
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} changes were noticed")
    return 1 if any(mutant.name in survivors for mutant in BY_HAND) else 0


if __name__ == "__main__":
    sys.exit(main())
