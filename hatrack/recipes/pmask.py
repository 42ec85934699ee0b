"""Hard attention on single parameters (003): Raskoti, Ghimire. Its tables and figures are empty; only an order is told."""

from dataclasses import replace
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.recipes.plots import accuracy_by_task, sweep
from hatrack.recipes.quantities import accuracy_on, summary
from hatrack.recipes.recipe import Claim, Part, Recipe, Row, above, below
from hatrack.recipes.results import Results
from hatrack.regime import Regime

ACCURACY, LEARNING, FORGETTING = summary("accuracy"), summary("learning"), summary("forgetting")
EPOCHS = 60  # per task at most
EWC = {"strength": 5000.0, "limit": 0.0, "anchors": "mean", "estimator": "batches"}  # 001's


def five_tasks(benchmark: str, method: str, clip: float = 1e4, optimizer: Any = "sgd", **options: Any) -> Run:
    """Return the run of a method on five tasks, in 001's regime."""
    lr = 0.001 if optimizer == "adam" else 0.05
    regime = Regime(epochs=EPOCHS, clip=clip, optimizer=optimizer, lr=lr)
    return Run(benchmark, method, regime=regime, method_options=options)


FIGURE_3 = ("PMASK", "SGD", "EWC", "PathNet")  # the methods that the paper's figures compare
COMPETITIVE = 0.05  # the largest difference of accuracies that are competitive
PATHNET = {
    "cifar10-5": "With the clipping of 001's code, 1,000, the first two paths of task 1 have training losses of 5 and 43 "
    "million in their first epoch, and every task stays at chance. Other clippings were not tried. That tasks 2 and 3 "
    "drop fails here by this row alone, which learned nothing that could drop; and by it alone EWC and PathNet are not "
    "competitive.",
}


BETTER = above("Parameter masks are better than SGD, EWC and PathNet.", ACCURACY, "PMASK", "SGD", "EWC", "PathNet")


def comparison(name: str, title: str, benchmark: str, figure: str, text: str = "", claims: tuple[Claim, ...] = ()) -> Part:
    """Return a table of the paper and the figure that belongs to it.

    Args:
        name: the word for `--only`.
        title: the heading.
        benchmark: the tasks.
        figure: the title of the figure.
        text: what follows the text that both tables have.
        claims: what the paper says of this table alone.
    """
    rows = (
        Row("PMASK", five_tasks(benchmark, "pmask")),
        Row("HAT", five_tasks(benchmark, "hat"), note="Not in 003."),
        Row("PackNet", five_tasks(benchmark, "packnet"), (0,), note="Not in 003."),
        Row("EWC", five_tasks(benchmark, "ewc", 100, **EWC)),
        Row("PathNet", five_tasks(benchmark, "pathnet", 1e3), (0,), note=PATHNET.get(benchmark, "")),
        Row("PNN", five_tasks(benchmark, "pnn", columns="budget"), (0,)),
        Row("SGD-F", five_tasks(benchmark, "frozen"), (0,)),
        Row("SGD", five_tasks(benchmark, "sgd")),
    )
    return Part(
        name,
        title,
        f"The table is empty in the paper. At most {EPOCHS} epochs per task in place of 200; the baselines have "
        f"the settings of 001's code.{text}",
        rows,
        (ACCURACY, LEARNING, FORGETTING),
        claims=(BETTER, *claims),
        plots=(accuracy_by_task("tasks", figure),),
    )


def _middle_drops(results: Results) -> bool | None:
    """Return whether the accuracy at the end on tasks 2 and 3 is below that on task 1, for every method of figure 3."""
    rows = [[results.mean(label, accuracy_on(task, 5)) for task in (1, 2, 3)] for label in FIGURE_3]
    known = [values for values in rows if None not in values]
    if any(max(second or 0, third or 0) >= (first or 0) for first, second, third in known):
        return False
    return True if len(known) == len(rows) else None


def _competitive(results: Results) -> bool | None:
    """Return whether neither EWC nor PathNet is much better than the other."""
    a, b = (results.mean(label, ACCURACY) for label in ("EWC", "PathNet"))
    return None if a is None or b is None else abs(a - b) <= COMPETITIVE


def both_data_sets() -> Part:
    """Return the comparison of figure 4 with figure 3, method by method."""
    data_sets = {"CIFAR-10": "cifar10-5", "CIFAR-100": "cifar100-5"}
    tables = {
        name: {row.label: row for row in comparison("", "", benchmark, "").rows} for name, benchmark in data_sets.items()
    }
    rows = [replace(table[m], label=f"{m}, {name}", note="") for m in FIGURE_3 for name, table in tables.items()]
    return Part(
        "both",
        "Figure 4 against figure 3",
        "By chance an answer is right in 50 % of the cases in a task of CIFAR-10, in 5 % in one of CIFAR-100. "
        "PathNet stays at chance on CIFAR-10, see the first table.",
        tuple(rows),
        (ACCURACY,),
        claims=tuple(
            below(f"The overall accuracy is smaller than on CIFAR-10 ({m}).", ACCURACY, f"{m}, CIFAR-100", f"{m}, CIFAR-10")
            for m in FIGURE_3
        ),
    )


def sweep_rows(option: str, values: tuple[float, ...], group: str = "", **others: Any) -> tuple[Row, ...]:
    """Return PMASK on CIFAR-10 with these values of an option."""
    runs = {v: five_tasks("cifar10-5", "pmask", **{option: v}, **others) for v in values}
    return tuple(Row(f"{group}{option} = {v:g}", run, (0,), x=v) for v, run in runs.items())


def reasonable(option: str, rows: tuple[Row, ...]) -> Claim:
    """Return the claim that a method works at all values of an option that were tried."""
    text = f"Any variation of {option} within its range results in reasonable performance (here: better than plain SGD)."
    return below(text, ACCURACY, "SGD", *(row.label for row in rows))


SGD = Row("SGD", five_tasks("cifar10-5", "sgd"), (0,), note="What is reasonable has to be better.")
BINARY = sweep_rows("smax", (25.0, 100.0, 400.0, 800.0), "binary, ")
SOFT = sweep_rows("smax", (25.0, 400.0, 800.0), "soft, ", masks="soft")
PRICES = sweep_rows("c", (0.1, 0.75, 2.5))


RECIPE = Recipe(
    "pmask",
    "003: hard attention on single parameters",
    "Raskoti, Ghimire: a report",
    "A gate per weight and task. The tables and figures of the paper are empty: it tells an order of the methods and "
    "nothing else, and its equations leave gaps (see the page of the method pmask). This recipe fills them.",
    (
        comparison(
            "cifar10",
            "Table 1 and figure 3: CIFAR-10 in five tasks",
            "cifar10-5",
            "Figure 3: accuracy on each task",
            " Tasks 2 and 3 drop if both end below task 1. “All methods” are those of figure 3: PMASK, SGD, EWC and "
            f"PathNet. Two methods are competitive if they are at most {100 * COMPETITIVE:g} points apart.",
            (
                Claim("The performance of EWC and PathNet is competitive.", _competitive),
                Claim("Tasks 2 and 3 drop for all methods.", _middle_drops),
            ),
        ),
        comparison(
            "cifar100", "Table 2 and figure 4: CIFAR-100 in five tasks", "cifar100-5", "Figure 4: accuracy on each task"
        ),
        both_data_sets(),
        Part(
            "smax",
            "The hardness smax",
            "CIFAR-10 in five tasks, one seed at least. In all other tables gates of finished tasks are binary: a weight "
            "that a finished task uses keeps its bits, and no other has a part in its answers, so that forgetting is "
            "exactly 0 whatever smax is, and smax matters for learning alone. That a low smax forgets is about gates that "
            "stay sigmoid(smax e): the paper says that PMASK “does not use purely binary masks” and that smax “controls the "
            "degree of binarization”. These are the rows with soft masks. At smax = 1, below the paper's range, soft "
            "masks do forget: see the page of the method pmask. Tasks have at most 60 epochs here, as in all tables, where "
            "the paper has 200; with a high smax some of them had not ended.",
            (*BINARY, *SOFT, SGD),
            (ACCURACY, LEARNING, FORGETTING),
            claims=(
                reasonable("smax", BINARY),
                above(
                    "With a low smax the network may easily forget (soft masks; here: more at 25, the lowest of the paper's "
                    "good values, than at 400 and 800).",
                    FORGETTING,
                    "soft, smax = 25",
                    "soft, smax = 400",
                    "soft, smax = 800",
                ),
                below(
                    "With a high smax it may have difficulties in adapting to new tasks (binary masks).",
                    LEARNING,
                    "binary, smax = 800",
                    "binary, smax = 25",
                ),
            ),
            plots=(sweep("smax", "Average accuracy against smax", "hardness smax", ACCURACY, ("binary", "soft")),),
        ),
        Part(
            "c",
            "The price c of capacity",
            "CIFAR-10 in five tasks, one seed at least.",
            (*PRICES, SGD),
            (ACCURACY, FORGETTING),
            claims=(
                reasonable("c", PRICES),
                below("A high c is at the expense of accuracy.", ACCURACY, "c = 2.5", "c = 0.1"),
            ),
            plots=(sweep("c", "Average accuracy against c", "price c of capacity", ACCURACY),),
        ),
        Part(
            "optimizer",
            "SGD or Adam",
            "The paper names Adam in one place and plain SGD in another. CIFAR-10 in five tasks, one seed at least; Adam "
            "at 0.001.",
            (
                Row("SGD", five_tasks("cifar10-5", "pmask"), (0,)),
                Row("Adam", five_tasks("cifar10-5", "pmask", optimizer="adam"), (0,)),
            ),
            (ACCURACY, LEARNING, FORGETTING),
        ),
    ),
)
