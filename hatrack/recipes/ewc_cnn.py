"""EWC on a convolutional network (002): Sörberg 2020. It shows figures and states claims, but hardly a number."""

from dataclasses import replace
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.recipes.plots import sweep, tasks_by_epoch
from hatrack.recipes.quantities import accuracy_on, accuracy_range, fluctuation, less, lowest_accuracy, summary
from hatrack.recipes.recipe import Claim, Part, Recipe, Row, above, below, exceeds, percent
from hatrack.recipes.results import Results
from hatrack.recipes.timings import PART as TIMES
from hatrack.regime import Regime

ACCURACY, FORGETTING, LOWEST = summary("accuracy"), summary("forgetting"), lowest_accuracy()
RANGE, FLUCTUATION = accuracy_range(), fluctuation()
FIRST_AFTER_SECOND, SECOND_AFTER_SECOND = accuracy_on(1, 2), accuracy_on(2, 2)
SECOND_LESS_FOURTH = less(accuracy_on(2, 5), accuracy_on(4, 5))
LOST_BY_THREE = less(accuracy_on(1, 1), accuracy_on(1, 4))  # of the first task, by the three that follow it
CHANCE, FAR, HIGH = 0.1, 0.2, 0.9  # of ten classes; what is a lot; an accuracy that is high
ADAM = Regime(epochs=30, optimizer="adam", lr=1e-4, schedule="constant")
TASKS: dict[str, Any] = {"tasks": 5, "normalise": False, "valid": 0.0}
EVERY: dict[str, Any] = {"limit": 0.0}  # a spring for every earlier task, without a limit of its stiffness
LAST: dict[str, Any] = {"limit": 0.0, "anchors": "last"}


def permuted(method: str, benchmark: str = "pmnist", network: str = "cnn", **options: Any) -> Run:
    """Return the run of a method on five permutations of MNIST, with one head and Keras's initial weights."""
    first = {"first": "plain"} if benchmark == "pmnist" else {}
    widths: dict[str, Any] = {"widths": (1024, 1024)} if network == "mlp" else {}
    return Run(
        benchmark,
        method,
        network=network,
        heads="shared",
        init="xavier",
        regime=ADAM,
        benchmark_options={**TASKS, **first},
        network_options=widths,
        method_options=options,
        watch_tasks=True,
    )


def on_cifar(method: str, **options: Any) -> Run:
    """Return the run of a method on CIFAR-100, with convolutions that were trained on CIFAR-10 and do not move."""
    return Run(
        "cifar100-5",
        method,
        network="vgg",
        init="xavier",
        pretrain="cifar10",
        freeze="features",
        regime=Regime(epochs=30),
        method_options=options,
        watch_tasks=True,
    )


NONE, L2, EWC, EWC_LAST = "no penalty", "L2", "EWC, every earlier task", "EWC, the last task only"
NONE_NOTE = (
    "The 60 % stand in a caption, for one run. The report does not say how pixels were scaled, whether Adam began anew with "
    "each task, or which permutations were drawn; here pixels go from 0 to 1 and Adam begins anew. Nothing else was tried; "
    "we believe that the reason is one of these."
)


def _newest_best(results: Results) -> bool | None:
    """Return whether the task that was learned last has the highest accuracy of all, after every task."""
    rows = [[results.mean(EWC, accuracy_on(task, after)) for task in range(1, after + 1)] for after in range(2, 6)]
    if any(value is None for row in rows for value in row):
        return None
    return all((row[-1] or 0) > (other or 0) for row in rows for other in row[:-1])


FIGURES = Part(
    "figures-3-5",
    "Figures 1, 3, 4 and 5: no penalty, L2, and EWC for every task or for the last one",
    "Plain MNIST and four permutations of its pixels, one head, Adam at 0.0001, 30 epochs per task, strength 200. Of L2 the "
    "report has only a drawing, figure 1, which is that of EWC's own paper; the row with it is ours, with a strength of 1 "
    "that was chosen before any result was seen. Fluctuation needs the accuracies after every epoch, which not every record "
    "has.",
    (
        Row(NONE, permuted("sgd"), published={FIRST_AFTER_SECOND.key: percent(60)}, note=NONE_NOTE),
        Row(L2, permuted("ewc", importance="ones", strength=1.0, limit=0.0)),
        Row(EWC, permuted("ewc", **EVERY)),
        Row(EWC_LAST, permuted("ewc", **LAST)),
    ),
    (FIRST_AFTER_SECOND, ACCURACY, FORGETTING, LOWEST, RANGE, FLUCTUATION),
    {FIRST_AFTER_SECOND.key: 0.05},
    claims=(
        exceeds("Without a penalty, performance on old tasks drops significantly (here: by 0.2).", FORGETTING, NONE, FAR),
        exceeds("With a penalty for each task, performance is high on all tasks (here: over 90 %).", LOWEST, EWC, HIGH),
        exceeds(
            "Without a penalty task 1 is a lot better than chance after task 2 (here: 20 points).",
            FIRST_AFTER_SECOND,
            NONE,
            CHANCE + FAR,
        ),
        Claim("The network always performs best on the newest task (a penalty for each task).", _newest_best),
        above("A penalty for every task offers the best performance.", ACCURACY, EWC, EWC_LAST, NONE),
        below(
            "And the most consistent one (here: the smallest range of accuracies at the end).", RANGE, EWC, EWC_LAST, NONE
        ),
        above("A penalty for the last task is far better than none.", ACCURACY, EWC_LAST, NONE, by=0.05),
        exceeds(
            "With a penalty for the last task, a task degrades after two or three more (here: task 1 by 0.05 after three).",
            LOST_BY_THREE,
            EWC_LAST,
            0.05,
        ),
        above(
            "There is a lot of fluctuation on the older tasks with a penalty for the last task (here: more than with one "
            "for each task).",
            FLUCTUATION,
            EWC_LAST,
            EWC,
        ),
        exceeds("In the end task 2 is better than task 4 (a penalty for each task).", SECOND_LESS_FOURTH, EWC, 0.0),
        below(
            "Figure 1: without regularization the network completely forgets task A (here: task 1 is within 5 points of "
            "chance after task 2).",
            FIRST_AFTER_SECOND,
            NONE,
            by=-(CHANCE + 0.05),
        ),
        above(
            "Figure 1: L2 ends in between (here: after task 2 it is better on task 1 than no penalty).",
            FIRST_AFTER_SECOND,
            L2,
            NONE,
        ),
        below(
            "Figure 1: L2 ends in between (here: after task 2 it is worse on task 2 than no penalty).",
            SECOND_AFTER_SECOND,
            L2,
            NONE,
        ),
        exceeds("Figure 1: with EWC task A can still be solved well (here: over 90 %).", FIRST_AFTER_SECOND, EWC, HIGH),
        exceeds("Figure 1: and EWC learns to solve task B (here: over 90 %).", SECOND_AFTER_SECOND, EWC, HIGH),
    ),
    plots=(
        tasks_by_epoch(NONE, "none", "Figure 3: no penalty"),
        tasks_by_epoch(EWC, "every", "Figure 4: a penalty for each task"),
        tasks_by_epoch(EWC_LAST, "last", "Figure 5: a penalty for the previous task"),
        tasks_by_epoch(L2, "l2", "L2, of figure 1"),
    ),
)


PIXELS, CNN = "CNN, all pixels", "CNN"  # what figures 3 and 4 show, beside what is proposed in place of it


def _of_figures(label: str, what: str) -> Row:
    """Return a row of the figures for another table, with a word for what differs."""
    row = next(row for row in FIGURES.rows if row.label == label)
    return replace(row, label=f"{label}, {what}", seeds=(0,), published={}, note="")


RECIPE = Recipe(
    "ewc-cnn",
    "002: elastic weight consolidation on a convolutional network",
    "a report by S. Sörberg, 2020",
    "A convolutional network of 13.9 million weights learns MNIST and four permutations of it with one head. The report "
    "shows figures; its one number is the accuracy on the first task after the second, a mere 60 % without a penalty. What "
    "it proposes as further work has parts of its own here.",
    (
        FIGURES,
        Part(
            "strength",
            "The strength of the penalty",
            "One seed at least. The report uses 200.",
            tuple(
                Row(f"strength {value:g}", permuted("ewc", limit=0.0, strength=value), (0,), x=value)
                for value in (2.0, 20.0, 200.0, 2000.0, 20000.0)
            ),
            (ACCURACY, summary("learning"), FORGETTING),
            plots=(sweep("strength", "Average accuracy against the strength", "strength", ACCURACY),),
        ),
        Part(
            "blocks",
            "Proposed by 002: permuting blocks of 7x7 pixels",
            "Sixteen blocks change their places, so that local features stay. One seed at least.",
            (
                Row(NONE, permuted("sgd", "pmnist-blocks"), (0,)),
                Row(EWC, permuted("ewc", "pmnist-blocks", **EVERY), (0,)),
                _of_figures(NONE, PIXELS),
                _of_figures(EWC, PIXELS),
            ),
            (ACCURACY, summary("learning"), FORGETTING),
        ),
        Part(
            "mlp",
            "Proposed by 002: a fully connected network",
            "Two hidden layers of 1024 units. One seed at least.",
            (
                Row(NONE, permuted("sgd", network="mlp"), (0,)),
                Row(EWC, permuted("ewc", network="mlp", **EVERY), (0,)),
                _of_figures(NONE, CNN),
                _of_figures(EWC, CNN),
            ),
            (ACCURACY, summary("learning"), FORGETTING),
            claims=(
                above(
                    "The convolutional layer limits the performance on permuted data sets (here: EWC is better without).",
                    ACCURACY,
                    EWC,
                    f"{EWC}, {CNN}",
                ),
            ),
        ),
        Part(
            "vgg",
            "Proposed by 002: a pretrained network whose convolutions are frozen",
            "A VGG-like network is trained on CIFAR-10; its convolutions stay as they are, and EWC protects the other "
            "layers on CIFAR-100 in five tasks, with a head for each. One seed at least, at most 30 epochs per task, plain "
            "SGD at 0.05, for which the springs of EWC (strength 200) have their limit of 10.",
            (
                Row(NONE, on_cifar("sgd"), (0,)),
                Row("EWC", on_cifar("ewc"), (0,)),
            ),
            (ACCURACY, summary("learning"), FORGETTING),
        ),
        TIMES,
    ),
)
