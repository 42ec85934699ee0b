"""HAT (001) on ten tasks of CIFAR-10 and CIFAR-100: all approaches, other lengths, and the sweeps of figure 4."""

from dataclasses import replace
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.recipes.grids import accuracy_by_position, ratio_by_tasks
from hatrack.recipes.hat_approaches import APPROACHES, MERGED, RANDOM, Approach, joint
from hatrack.recipes.hat_table_1 import BASELINES, always, but
from hatrack.recipes.plots import ratio_lines, sweep
from hatrack.recipes.quantities import ratio, summary
from hatrack.recipes.recipe import Claim, Part, Published, Row, above, below

ACCURACY, RATIO, RATIO_10 = summary("accuracy"), ratio(), ratio(10)
LEARNING, FORGETTING = summary("learning"), summary("forgetting")
CIFAR_SEEDS = {"PNN": (0,), "PathNet": (0,), "IMM-mean": (0, 1, 2), "IMM-mode": (0,)}
CIFAR_PUBLISHED = {"HAT": Published(-0.09), "EWC": Published(-0.18)}  # the text does not say over how many seeds
XAVIER_NOTE = "Xavier's initial weights, which 001's text names; its code has PyTorch's."
OURS = (  # approaches with the defaults of this library
    Approach("EWC, our defaults", "ewc", note="A stiffness by single images, for every task, limited: see the page of ewc."),
    Approach("IMM-mode, our defaults", "imm-mode", note="As merged, but clipped at 10,000, and at three seeds."),
    Approach("LFL, our defaults", "lfl", note="Strength 0.0005 in place of 0.05, and clipped at 10,000 in place of 200."),
    Approach("LwF, clipped at 10,000", "lwf", note="As HAT is clipped; LwF's authors' code in 001 clips at 100."),
)


def _cifar_rows() -> tuple[Row, ...]:
    rows = []
    for approach in (*APPROACHES, MERGED, *OURS):
        published = {"ratio_10": CIFAR_PUBLISHED[approach.label]} if approach.label in CIFAR_PUBLISHED else {}
        seeds = CIFAR_SEEDS.get(approach.label, (0,) if approach is MERGED else approach.seeds)
        rows.append(Row(approach.label, approach.run("cifar"), seeds, published, approach.note))
    references = [
        Row("joint", joint().run("cifar"), (0,), reference=True, note="After every number of tasks, at one seed."),
        Row("joint, all tasks", joint(10).run("cifar"), (1, 2), reference=True, note="After the tenth task only."),
        Row("random", RANDOM.run("cifar"), reference=True),
    ]
    return (*rows, *references, *_xavier_rows())


def _xavier_rows() -> list[Row]:
    names = ("joint, xavier",)
    approaches = {"HAT, xavier": APPROACHES[0], "SGD, xavier": APPROACHES[7], "joint, xavier": joint(10)}
    return [
        Row(label, replace(a.run("cifar"), init="xavier"), (0,), note=XAVIER_NOTE, joint=names, reference="joint" in label)
        for label, a in approaches.items()
    ]


def _sweep_rows(option: str, values: tuple[float, ...], **others: Any) -> tuple[Row, ...]:
    runs = {value: Run("cifar", "hat", method_options={option: value, **others}) for value in values}
    return tuple(Row(f"{option} = {value:g}", run, (0,), x=value) for value, run in runs.items())


def _reasonable(rows: tuple[Row, ...]) -> Claim:
    """Return the claim that no value of a sweep is a bad one."""
    text = "Any variation within this range results in reasonable performance (here: every value forgets less than EWC)."
    return below(text, RATIO_10, EWC.label, *(row.label for row in rows))


def _cifar_references() -> list[Row]:
    """Return the references of rows on cifar that have one seed."""
    return [row for row in _cifar_rows() if row.label in ("joint", "random")]


def _length_rows() -> tuple[Row, ...]:
    """Return the approaches on the first tasks of cifar. Only PNN, whose columns share a budget, needs a run of its own for
    every number of tasks."""
    rows = [
        Row(
            f"{a.label} of {tasks}",
            a.run("cifar", tasks=tasks) if a.label == "PNN" else a.run("cifar"),
            (0,),
            note=a.note,
            x=tasks,
            first=0 if a.label == "PNN" else tasks,
        )
        for tasks in (2, 4, 6, 8, 10)
        for a in APPROACHES[:4]
    ]
    return (*rows, *_cifar_references())


CIFAR = Part(
    "cifar",
    "Ten tasks of CIFAR-10 and CIFAR-100",
    "Five tasks of two classes and five of twenty, in the order of the seed. The paper gives the ratios of two approaches "
    "after ten tasks, and calls EWC the best baseline from three tasks on, so better than PathNet and PNN. 15 % of the "
    "images are held out for validation, as the paper says; its code holds out 10 %. Gates are binary after training; in "
    "the code they stay soft. Compiled and recorded steps round differently, as other seeds would. Joint training after "
    "every number of tasks has one seed, so that the figure, and the ratios after fewer than ten tasks, are of that seed.",
    _cifar_rows(),
    (RATIO_10, ACCURACY, LEARNING, FORGETTING),
    {"ratio_10": 0.02},
    claims=(
        above("HAT forgets less than EWC.", RATIO_10, "HAT", "EWC"),
        always("HAT outperforms all baselines for all t (here: t ≥ 2).", range(2, 11), "HAT", *BASELINES),
        above("PathNet and PNN end below EWC at t = 10.", RATIO_10, "EWC", "PNN", "PathNet"),
        always("The best baseline for t ≥ 3 is EWC.", range(3, 11), "EWC", *but("EWC")),
    ),
    plots=(ratio_lines(),),
    grids=(ratio_by_tasks, accuracy_by_position("HAT")),
)


ONE_RUN = (
    "One seed at least, on cifar after ten tasks; the paper's figure is of the mixture after eight, at seed 0 as well. A "
    "point is one run, and runs of one setting with other seeds differ about as much as most of these: see HAT in the part "
    "cifar."
)
EWC = replace(next(row for row in _cifar_rows() if row.label == "EWC"), seeds=(0,), published={}, note="To compare with.")
HARDNESSES = _sweep_rows("smax", (25, 50, 100, 200, 400, 800), masks="soft")
SMAX = Part(
    "smax",
    "Figure 4, left: the hardness smax",
    "Gates that are used and kept as they are, soft, as in the authors' code, because binary gates never forget. " + ONE_RUN,
    (*HARDNESSES, EWC, *_cifar_references()),
    (RATIO_10, ACCURACY, LEARNING, FORGETTING),
    claims=(
        _reasonable(HARDNESSES),
        above(
            "With a low smax the network may easily forget (here: more at 25 than at 400 and at 800).",
            FORGETTING,
            "smax = 25",
            "smax = 400",
            "smax = 800",
        ),
        below(
            "With a high smax it may have difficulties in adapting to new tasks (here: they are learned less well at 800 "
            "than at 25).",
            LEARNING,
            "smax = 800",
            "smax = 25",
        ),
    ),
    plots=(sweep("smax", "Figure 4: the forgetting ratio against smax", "hardness smax", RATIO, ("smax",)),),
)

PRICES = _sweep_rows("c", (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5))
C = Part(
    "c",
    "Figure 4, right: the price c of capacity",
    "Gates of finished tasks are binary. " + ONE_RUN,
    (*PRICES, EWC, *_cifar_references()),
    (RATIO_10, ACCURACY, LEARNING),
    claims=(
        _reasonable(PRICES),
        below(
            "A high c is at the expense of the accuracy that could be reached (here: tasks are learned less well at 2.5 "
            "than at 0.1).",
            LEARNING,
            "c = 2.5",
            "c = 0.1",
        ),
    ),
    plots=(sweep("c", "Figure 4: the forgetting ratio against c", "price c of capacity", RATIO, ("c",)),),
)

LENGTHS = Part(
    "lengths",
    "Sequences of other lengths",
    "The paper observes that PathNet and PNN, which assign a fixed number of parameters to each task, fall as sequences "
    "grow from two to eight tasks. The first tasks of cifar; forgetting ratios are of the one seed that joint training has. "
    "Every number of tasks has a PNN of its own, with "
    "the budget for this number. The modules of PathNet have the budget of one network, whatever the number, as in the "
    "authors' code, so that its rows, as those of HAT and EWC, are the beginnings of one run.",
    _length_rows(),
    (RATIO, ACCURACY),
    claims=(
        above("PathNet is lower with a sequence of eight tasks than of two.", RATIO, "PathNet of 2", "PathNet of 8"),
        above("PNN is lower with a sequence of eight tasks than of two.", RATIO, "PNN of 2", "PNN of 8"),
    ),
    plots=(sweep("lengths", "Forgetting ratio against the length", "tasks", RATIO, ("HAT", "PNN", "PathNet", "EWC")),),
)
