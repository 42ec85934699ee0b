"""Stable training regimes (004): Mirzadeh, Farajtabar, Pascanu, Ghasemzadeh, NeurIPS 2020, https://arxiv.org/abs/2006.06958

Where the authors' scripts and their later word differ, or a script is known to fail, both are rows.
"""

from dataclasses import replace
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.recipes.grids import flatness_correlations
from hatrack.recipes.plots import accuracy_lines, flatness_lines, sweep
from hatrack.recipes.quantities import (
    Quantity,
    distance_moved,
    epochs_to,
    forgetting_bound,
    largest_eigenvalue,
    loss_forgotten,
    summary,
)
from hatrack.recipes.recipe import Part, Published, Recipe, Row, above, below, exceeds, percent
from hatrack.regime import Regime

ACCURACY, LEARNING, FORGETTING = summary("accuracy"), summary("learning"), summary("forgetting_mirzadeh")
COLUMNS: tuple[Quantity, ...] = (ACCURACY, FORGETTING, LEARNING)
MOMENTUM = Regime(epochs=1, batch=10, lr=0.01, optimizer="momentum", momentum=0.8)
REPLAY_NOTE = (
    "004 takes its baselines from another code: 23 tasks, rotations of 7.8 degrees per task in place of 10, 50,000 images "
    "per task, dropout also at test, other initial weights, a Fisher from the last batches. So this is not quite like with "
    "like."
)
RUNS = 5  # behind the numbers of Table 2
STABLE: dict[str, Any] = {"decay_from": "first"}  # the authors' code decays the rate before the first task already


def published(accuracy: float, std: float, forgetting: float, forgetting_std: float) -> dict[str, Published]:
    """Return the two numbers of a cell of Table 2."""
    lost = Published(forgetting, forgetting_std, RUNS)
    return {"accuracy": percent(accuracy, std, RUNS), "forgetting_mirzadeh": lost}


def mnist(benchmark: str, method: str, regime: Regime, *, width: int = 256, dropout: float = 0.0, **options: Any) -> Run:
    """Return the run of a method on permuted or rotated MNIST with one head."""
    plain: dict[str, Any] = {"first": "plain", "normalise": False, "valid": 0.0} if benchmark == "pmnist" else {}
    own = [name for name in options if name in ("tasks", "step", "valid")]
    chosen = {name: options.pop(name) for name in own}
    tasks: dict[str, Any] = {"tasks": 20, **plain, **chosen}
    return Run(
        benchmark,
        method,
        heads="shared",
        regime=regime,
        benchmark_options=tasks,
        network_options={"widths": (width, width), "dropout": dropout, "input_dropout": 0.0},
        method_options=options,
    )


def stable(benchmark: str, **options: Any) -> Run:
    """Return stable SGD on MNIST; its learning rate, batch and dropout are options of the method."""
    own = {name: options.pop(name) for name in ("width", "tasks", "step", "regime") if name in options}
    regime = replace(own.pop("regime", MOMENTUM), batch=64, lr=0.05)  # not in use: those of the method are
    return mnist(benchmark, "stable-sgd", regime, dropout=0.25, **own, **STABLE, **options)


def baseline(benchmark: str, method: str, **options: Any) -> Run:
    """Return a baseline of Table 2 as in the code of A-GEM, which 004 uses: batch 32, plain SGD at 0.1, dropout."""
    return mnist(benchmark, method, Regime(epochs=1, batch=32, lr=0.1), dropout=0.25, **options)


EWC: dict[str, Any] = {"strength": 20.0, "limit": 0.0, "anchors": "last", "rescale": True}
ER: dict[str, Any] = {"memory": 230, "replay": 64}
AGEM: dict[str, Any] = {"per_class": 1, "reference": 64}
NUMBERS = {  # Table 2: accuracy and forgetting, by benchmark
    "pmnist": {
        "naive SGD": published(44.4, 2.46, 0.53, 0.03),
        "EWC": published(70.7, 1.74, 0.23, 0.01),
        "A-GEM": published(65.7, 0.51, 0.29, 0.01),
        "ER": published(72.4, 0.42, 0.16, 0.01),
        "stable SGD": published(80.1, 0.51, 0.09, 0.01),
        "multi-task": {"accuracy": percent(86.5, 0.21, RUNS)},
    },
    "rmnist": {
        "naive SGD": published(46.3, 1.37, 0.52, 0.01),
        "EWC": published(48.5, 1.24, 0.48, 0.01),
        "A-GEM": published(55.3, 1.47, 0.42, 0.01),
        "ER": published(69.2, 1.10, 0.21, 0.01),
        "stable SGD": published(70.8, 0.78, 0.10, 0.02),
        "multi-task": {"accuracy": percent(87.3, 0.47, RUNS)},
    },
    "cifar100-20": {
        "naive SGD": published(40.4, 2.83, 0.31, 0.02),
        "EWC": published(42.7, 1.89, 0.28, 0.03),
        "A-GEM": published(50.7, 2.32, 0.19, 0.04),
        "ER": published(46.9, 0.76, 0.21, 0.03),
        "stable SGD": published(59.9, 1.81, 0.08, 0.01),
        "multi-task": {"accuracy": percent(64.8, 0.72, RUNS)},
    },
}
WORD = {  # stable SGD by the authors' later word; for permuted MNIST there is none
    "pmnist": {"lr_decay": 0.7, "small_batch": 64, "drop": 0.25},
    "rmnist": {"lr_decay": 0.55, "small_batch": 64, "drop": 0.25},
    "cifar100-20": {"first_lr": 0.15, "lr_decay": 0.85, "small_batch": 10, "drop": 0.1},
}
SCRIPT = {
    "pmnist": {"lr_decay": 0.8, "small_batch": 10, "drop": 0.5},
    "rmnist": {"lr_decay": 0.5, "small_batch": 10, "drop": 0.5},
    "cifar100-20": {"lr_decay": 0.8, "small_batch": 10, "drop": 0.5},
}
WORD_NOTE = {
    "pmnist": "No setting of the authors that works is known; this one is the best of eight tried by others on test data.",
    "rmnist": "By the authors' later word in public (issue 5 of their code). A port of their code to numpy gave 67.1 % and "
    "0.18 with it at one seed, and reached the published numbers with none of four settings.",
    "cifar100-20": "By the authors' later word in public (issues 5 and 6 of their code).",
}
SCRIPT_NOTE = "As in the published script, which others could not make reach the published number either."
MULTI_TASK = "One epoch over all tasks together, in the regime of naive SGD; 004 does not say how it is trained. "
CUT = (
    "The code of its baselines has a switch for it that cuts the images of all tasks together to 50,000, where ours are 1.2 "
    "million: we believe that theirs had far fewer steps; whether Table 2 was made so is not known."
)
MULTI_TASK_NOTE = {
    "pmnist": MULTI_TASK + CUT,
    "rmnist": MULTI_TASK + CUT,
    "cifar100-20": MULTI_TASK
    + "The code of its baselines has a switch for it that trains one head on all classes at once, where "
    "ours has a head per task; whether Table 2 was made so, and whether that is the reason, is not known.",
}
NAIVE_NOTE = {
    "pmnist": "A port of the authors' code to numpy gave 39.0 % and 0.60 at one seed, further off than ours.",
    "cifar100-20": (
        "The setting is that of the authors' script. Ours has a head per task where theirs masks one head of 100 classes, "
        "which differs by the draw of the initial weights alone. The steps are those of a loop without the library "
        "(dev/plain_cifar100.py): from the same weights, in float64, losses agree to 1e-7 for six steps, until rounding, "
        "which grows hundreds of times from step to step, parts them. In float32 on a CPU that loop, with one masked head, "
        "gave 46.9 ± 2.0 % with the images of a task shuffled, as ours are (--shuffle, seeds 0 to 2), and 42.1 and 45.3 % "
        "in the order of our file (seeds 0 and 1); the authors' code does not shuffle either, but its file has another "
        "order. So ours is what this setting gives; whether the order is behind the published number is not known."
    ),
}
OWN_CODE_NOTE = (
    "That code also has 50,000 images per task, dropout at test and other initial weights, which ours does not; which of "
    "them makes the difference is not known."
)
CIFAR_REPLAY_NOTE = (
    "004 takes its baselines from another code, which it adapted. In the version that we read, that code has tasks of four "
    "classes (100 // 23) drawn by the seed, 2,000 images per task, pixels less their mean image, a ResNet-18 and initial "
    "weights of its own, a Fisher from the last batches, and for A-GEM and ER all of a memory of 80 images in every step, "
    "where ours draws 64 of 100. As we read it, it stops with an error before the first step (the network is built without "
    "arguments that it asks for), so that Table 2 seems to be of another version. Ours has the block of 004's own code, "
    "whose second convolution is never called. So this is not like with like, and what of it makes a difference is not "
    "known."
)


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
    return _table_2("cifar100-20", "cifar100", "Table 2: split CIFAR-100", runs, script)


def _table_2(benchmark: str, name: str, title: str, runs: dict[str, Run], script: Run) -> Part:
    numbers = NUMBERS[benchmark]
    notes = {
        "naive SGD": NAIVE_NOTE.get(benchmark, ""),
        "stable SGD": WORD_NOTE[benchmark],
        "multi-task": MULTI_TASK_NOTE[benchmark],
    }
    notes |= dict.fromkeys(("EWC", "A-GEM", "ER"), CIFAR_REPLAY_NOTE if benchmark == "cifar100-20" else REPLAY_NOTE)
    rows = [
        Row(label, run, published=numbers[label], note=notes.get(label, ""), reference=label == "multi-task")
        for label, run in runs.items()
    ]
    failing = Row("stable SGD, published script", script, published=numbers["stable SGD"], note=SCRIPT_NOTE)
    others = ("naive SGD", "EWC", "A-GEM", "ER")
    return Part(
        name,
        title,
        "Twenty tasks, one epoch each.",
        (*rows, failing),
        COLUMNS,
        {"accuracy": 0.02, "forgetting_mirzadeh": 0.02},
        claims=(
            above("Stable SGD is better than all others but multi-task training.", ACCURACY, "stable SGD", *others),
            below("Stable SGD forgets least.", FORGETTING, "stable SGD", *others),
        ),
        plots=(accuracy_lines(title="Figure 4: average accuracy against tasks learned"),),
    )


# The first experiment, and each ingredient by itself

FIVE = Regime(epochs=5, batch=64, lr=0.01, optimizer="momentum", momentum=0.8)


def first_experiment(benchmark: str, what: str) -> list[Row]:
    """Return the plastic and the stable regime on five tasks of five epochs."""
    short = {"tasks": 5, "width": 100, "regime": FIVE}
    both = {"lr_decay": 0.4, "small_batch": 16}
    return [
        Row(f"{what}, plastic", mnist(benchmark, "sgd", FIVE, tasks=5, width=100)),
        Row(f"{what}, stable", stable(benchmark, drop=0.25, **both, **short), note="Dropout by the authors' later word."),
        Row(f"{what}, stable, published script", stable(benchmark, drop=0.5, **both, **short), note=SCRIPT_NOTE),
    ]


def ingredients() -> tuple[Row, ...]:
    """Return regimes on rotated MNIST in which one ingredient is stable, or all but one are."""
    chosen = {
        "none": ("none",),
        "lr alone": ("lr",),
        "decay alone": ("decay",),
        "batch alone": ("batch",),
        "dropout alone": ("dropout",),
        "all but lr": ("decay", "batch", "dropout"),
        "all but decay": ("lr", "batch", "dropout"),
        "all but batch": ("lr", "decay", "dropout"),
        "all but dropout": ("lr", "decay", "batch"),
        "all": ("lr", "decay", "batch", "dropout"),
    }
    short = {"tasks": 5, "width": 100, "regime": FIVE, "lr_decay": 0.4, "small_batch": 16, "drop": 0.25}
    notes = {
        "all but decay": "Without decay a rate of 0.1 with momentum and small batches is too large for the newest task "
        "itself: see the learning accuracy."
    }
    rows = [
        Row(label, stable("rmnist", stable=names, **short), note=notes.get(label, "")) for label, names in chosen.items()
    ]
    shrinking = stable("rmnist", **{**short, "small_batch": 64, "batch_decay": 0.7})
    return (*rows, Row("all, and a batch that shrinks from 64", shrinking, note="By 0.7 from task to task."))


# Why: how curved the loss is where a task ends, and how far the next tasks move

EIGENVALUE, MOVED, LOST, BOUND = largest_eigenvalue(), distance_moved(), loss_forgotten(), forgetting_bound()


def flatness() -> tuple[Row, ...]:
    """Return three regimes on rotated MNIST: that of Table 2 for plain SGD, and the two of the first experiment."""
    plastic, stable_one, _ = first_experiment("rmnist", "rotated")
    naive = mnist("rmnist", "sgd", replace(FIVE, batch=MOMENTUM.batch), tasks=5, width=100)
    return Row("naive", naive), replace(plastic, label="plastic"), replace(stable_one, label="stable")


# What 004's readers set out to do: how fast a trained network learns the next task

REACH = epochs_to(0.95, 2)


def fine_tuning() -> tuple[Row, ...]:
    """Return schedules, first learning rates and decay factors on two tasks, of which the second is turned by 45 degrees."""
    rows = []
    for lr in (0.1, 0.03, 0.01):
        kinds: dict[str, dict[str, Any]] = {
            "constant": {"schedule": "constant"},
            "cosine": {"schedule": "cosine"},
            "exponential 0.9": {"schedule": "exponential", "gamma": 0.9},
            "exponential 0.7": {"schedule": "exponential", "gamma": 0.7},
            "step 0.1 every 5": {"schedule": "step", "gamma": 0.1, "every": 5},
        }
        for kind, fields in kinds.items():
            regime = Regime(epochs=15, batch=64, lr=lr, optimizer="momentum", momentum=0.8, **fields)
            run = mnist("rmnist", "sgd", regime, tasks=2, step=45.0, valid=0.15, width=100)
            rows.append(Row(f"{kind}, lr {lr:g}", run, x=lr))
    return tuple(rows)


RECIPE = Recipe(
    "regimes",
    "004: the role of training regimes",
    "Mirzadeh, Farajtabar, Pascanu, Ghasemzadeh, NeurIPS 2020, https://arxiv.org/abs/2006.06958",
    "Plain SGD forgets far less in a stable regime: a large learning rate that falls from task to task, small batches, "
    "dropout. The authors' scripts do not reach their numbers; where they corrected them in public, both are shown.",
    (
        table_2("rmnist", "rotated", "Table 2: rotated MNIST"),
        table_2("pmnist", "permuted", "Table 2: permuted MNIST"),
        split_cifar(),
        Part(
            "rotated-23",
            "Replay, A-GEM and EWC in the setting of their own code",
            "The code of the baselines turns by 180 / 23 degrees per task, where stable SGD has 10, and trains 23 tasks.",
            (
                Row(
                    "ER",
                    baseline("rmnist", "er", tasks=23, step=0.0, **ER),
                    published=NUMBERS["rmnist"]["ER"],
                    note=OWN_CODE_NOTE,
                ),
                Row(
                    "A-GEM",
                    baseline("rmnist", "agem", tasks=23, step=0.0, **AGEM),
                    published=NUMBERS["rmnist"]["A-GEM"],
                    note=OWN_CODE_NOTE,
                ),
                Row("EWC", baseline("rmnist", "ewc", tasks=23, step=0.0, **EWC), published=NUMBERS["rmnist"]["EWC"]),
            ),
            COLUMNS,
            {"accuracy": 0.02, "forgetting_mirzadeh": 0.02},
        ),
        Part(
            "first",
            "The first experiment: five tasks of five epochs",
            "The paper's figure has the stable regime above 90 %. A user of the scripts reports 87.0 % (rotated) and 77.7 % "
            "(permuted) for the plastic regime, 86.8 % and 61.7 % for the stable one with a dropout of 0.5; an early "
            "version of that code, which we believe was in use then, drops at test as well, which ours does not. It also "
            "drops the momentum after every epoch, which is kept over a task here.",
            (*first_experiment("rmnist", "rotated"), *first_experiment("pmnist", "permuted")),
            COLUMNS,
            claims=(
                below("The stable regime forgets less (rotated).", FORGETTING, "rotated, stable", "rotated, plastic"),
                below("The stable regime forgets less (permuted).", FORGETTING, "permuted, stable", "permuted, plastic"),
                *(
                    exceeds(f"The stable regime ends above 90 % ({what}).", ACCURACY, f"{what}, stable", 0.9)
                    for what in ("rotated", "permuted")
                ),
            ),
            plots=(accuracy_lines(),),
        ),
        Part(
            "ingredients",
            "Each ingredient of the stable regime by itself",
            "Rotated MNIST, five tasks of five epochs; the momentum is kept over a task, where the authors' code drops it "
            "after an epoch.",
            ingredients(),
            COLUMNS,
        ),
        Part(
            "flatness",
            "Why: curvature, distance and forgetting",
            "Rotated MNIST, five tasks of five epochs. The eigenvalues are those of exact Hessians on 1000 training images "
            "per task; the authors have theirs on test data. The paper's numbers are not known to us, its claims are.",
            flatness(),
            (EIGENVALUE, MOVED, LOST, BOUND, FORGETTING),
            claims=(below("The stable regime ends in flatter places.", EIGENVALUE, "stable", "plastic"),),
            plots=(flatness_lines(),),
            grids=(flatness_correlations,),
            flatness=True,
        ),
        Part(
            "fine-tuning",
            "Learning-rate schedules when a trained network learns the next task",
            "A network is trained on one rotation of MNIST and then on another, 45 degrees away on average, with one "
            "schedule for both. How many epochs of the second task until its validation accuracy is 95 %, and what becomes "
            "of the first.",
            fine_tuning(),
            (REACH, ACCURACY, FORGETTING),
            plots=(
                sweep(
                    "forgetting",
                    "Forgetting against the first learning rate",
                    "learning rate",
                    FORGETTING,
                    ("constant", "cosine", "exponential 0.9", "exponential 0.7", "step"),
                ),
            ),
        ),
    ),
)
