"""Table 2 of the training-regimes paper (004), and its baselines with the 23 tasks of the code that they are from."""

from dataclasses import replace
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.recipes.plots import accuracy_lines
from hatrack.recipes.recipe import Grid, Part, Row, above, above_some, below
from hatrack.recipes.regimes_numbers import (
    CIFAR_REPLAY_NOTE,
    CLASSES,
    MEMORYLESS,
    MULTI_TASK_NOTE,
    NAIVE_NOTE,
    NORMS_NOTE,
    NUMBERS,
    OWN_CODE_NOTE,
    RANDOM,
    RECENT,
    REPLAY_NOTE,
    SCRIPT,
    SCRIPT_NOTE,
    TOLERANCE,
    WORD,
    WORD_NOTE,
)
from hatrack.recipes.regimes_runs import (
    ACCURACY,
    AGEM,
    COLUMNS,
    ER,
    EWC,
    FORGETTING,
    MOMENTUM,
    STABLE,
    baseline,
    mnist,
    stable,
)
from hatrack.recipes.results import Results
from hatrack.regime import Regime


def table_2(benchmark: str, name: str, title: str) -> Part:
    """Return Table 2 on a benchmark of MNIST."""
    runs = {
        "naive SGD": mnist(benchmark, "sgd", MOMENTUM),
        "EWC": baseline(benchmark, "ewc", **EWC),
        "A-GEM": baseline(benchmark, "agem", **AGEM),
        "ER": baseline(benchmark, "er", **ER),
        "stable SGD": stable(benchmark, **WORD[benchmark]),
        "multi-task": mnist(benchmark, "joint", MOMENTUM, at=(20,)),
    }
    return _table_2(benchmark, name, title, runs, stable(benchmark, **SCRIPT[benchmark]))


def split_cifar() -> Part:
    """Return Table 2 on CIFAR-100 in twenty tasks."""

    def run(method: str, regime: Regime = MOMENTUM, dropout: float = 0.0, **options: Any) -> Run:
        network = {"width": 20, "block": "authors", "dropout": dropout}
        return Run("cifar100-20", method, network="resnet18", regime=regime, network_options=network, method_options=options)

    plain = Regime(epochs=1, batch=10, lr=0.03)
    unused = replace(MOMENTUM, batch=64, lr=0.05)
    runs = {
        "naive SGD": run("sgd"),
        "EWC": run("ewc", plain, **EWC),
        "A-GEM": run("agem", plain, **AGEM),
        "ER": run("er", plain, memory=100, replay=64),
        "stable SGD": run("stable-sgd", unused, 0.1, **STABLE, **WORD["cifar100-20"]),
        "multi-task": run("joint", at=(20,)),
    }
    script = run("stable-sgd", unused, 0.1, **STABLE, **SCRIPT["cifar100-20"])
    part = _table_2("cifar100-20", "cifar100", "Table 2: split CIFAR-100", runs, script)
    mixed = replace(runs["stable SGD"], benchmark_options={"labels": "random"})
    numbers = NUMBERS["cifar100-20"]["stable SGD"]
    row = Row("stable SGD, random classes", mixed, published=numbers, note=f"{RANDOM} {WORD_NOTE['cifar100-20']}")
    return replace(part, text=f"{part.text} {CLASSES}", rows=(*part.rows, row))


def _table_2(benchmark: str, name: str, title: str, runs: dict[str, Run], script: Run) -> Part:
    numbers = NUMBERS[benchmark]
    notes = {
        "naive SGD": NAIVE_NOTE.get(benchmark, ""),
        "stable SGD": WORD_NOTE[benchmark],
        "multi-task": MULTI_TASK_NOTE[benchmark],
    }
    notes |= dict.fromkeys(RECENT, REPLAY_NOTE.get(benchmark, CIFAR_REPLAY_NOTE))
    rows = [
        Row(label, run, published=numbers[label], note=notes.get(label, ""), reference=label == "multi-task")
        for label, run in runs.items()
    ]
    failing = Row(
        "stable SGD, published script",
        script,
        published=numbers["stable SGD"],
        note=SCRIPT_NOTE + NORMS_NOTE.get(benchmark, ""),
    )
    others = ("naive SGD", *RECENT)
    return Part(
        name,
        title,
        "Twenty tasks, one epoch each.",
        (*rows, failing),
        COLUMNS,
        TOLERANCE,
        claims=(
            above_some(
                "Simple techniques proved to be more effective than some of the recent approaches (EWC, A-GEM, ER).",
                ACCURACY,
                "stable SGD",
                *RECENT,
            ),
            above("Table 2: stable SGD is better than all others but multi-task training.", ACCURACY, "stable SGD", *others),
            below("Table 2: stable SGD forgets least.", FORGETTING, "stable SGD", *others),
        ),
        plots=(accuracy_lines(title="Figure 4: average accuracy against tasks learned"),),
        grids=(memoryless,) if name == "rotated" else (),  # once for the whole of Table 2
    )


def memoryless(results: Results) -> Grid:
    """Return the column of Table 2 that tells which approaches keep no data of earlier tasks, beside whether ours do."""
    rows = []
    for label, published in MEMORYLESS.items():
        kept = METHODS.find(results.rows[label].run.method).keeps
        ours = "no" if "images" in kept.values() else "yes"
        rows.append([label, published, "N/A" if label == "multi-task" else ours])
    title = "Memoryless, which is to say that no images of earlier tasks are kept (Table 2, of all benchmarks)"
    return Grid(title, ["approach", "published", "ours"], rows)


# The baselines with the tasks of the code that they are from


def own_code(benchmark: str, name: str, title: str, text: str, **tasks: Any) -> Part:
    """Return the baselines of Table 2 on the 23 tasks of their own code.

    Args:
        benchmark: the benchmark.
        name: of the part.
        title: of the part.
        text: which tasks these are.
        tasks: options of the benchmark.
    """
    options = {"ER": ("er", ER), "A-GEM": ("agem", AGEM), "EWC": ("ewc", EWC)}
    rows = [
        Row(
            label,
            baseline(benchmark, method, tasks=23, **tasks, **own),
            published=NUMBERS[benchmark][label],
            note=OWN_CODE_NOTE[benchmark],
        )
        for label, (method, own) in options.items()
    ]
    return Part(name, title, text, tuple(rows), COLUMNS, TOLERANCE)
