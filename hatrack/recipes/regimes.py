"""Stable training regimes (004): Mirzadeh, Farajtabar, Pascanu, Ghasemzadeh, NeurIPS 2020, https://arxiv.org/abs/2006.06958

Where the authors' scripts and their later word differ, or a script is known to fail, both are rows.
"""

from typing import Any

from hatrack.recipes.convergence import validation_curves
from hatrack.recipes.plots import sweep
from hatrack.recipes.quantities import accuracy_over_epochs, epochs_to
from hatrack.recipes.recipe import Part, Recipe, Row
from hatrack.recipes.regimes_runs import ACCURACY, FORGETTING, mnist
from hatrack.recipes.regimes_table_2 import own_code, split_cifar, table_2
from hatrack.recipes.regimes_theory import first_experiment, flatness, ingredients
from hatrack.regime import Regime

# What 004's readers set out to do: how fast a trained network learns the next task

SPEED, REACH = accuracy_over_epochs(2), epochs_to(0.95, 2)
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {"schedule": "constant"},
    "cosine": {"schedule": "cosine"},
    "exponential 0.9": {"schedule": "exponential", "gamma": 0.9},
    "exponential 0.7": {"schedule": "exponential", "gamma": 0.7},
    "step 0.1 every 5": {"schedule": "step", "gamma": 0.1, "every": 5},
}


def fine_tuning() -> Part:
    """Return schedules, first learning rates and decay factors on two tasks, of which the second is turned by 45 degrees."""
    rows = []
    for lr in (0.1, 0.03, 0.01):
        for kind, fields in SCHEDULES.items():
            regime = Regime(epochs=15, batch=64, lr=lr, optimizer="momentum", momentum=0.8, **fields)
            run = mnist("rmnist", "sgd", regime, tasks=2, step=45.0, valid=0.15, width=100)
            rows.append(Row(f"{kind}, lr {lr:g}", run, x=lr))
    groups = tuple(SCHEDULES)
    return Part(
        "fine-tuning",
        "Learning-rate schedules when a trained network learns the next task",
        "A network is trained on one rotation of MNIST and then on another, 45 degrees away on average, with one "
        "schedule for both. How fast it learns the second task: its accuracy on validation data after each of the 15 "
        "epochs, whose mean is the area below the curve; and how many epochs until it is 95 %, which says little, because "
        "most rows are there after the first. And what becomes of the first task.",
        tuple(rows),
        (SPEED, REACH, ACCURACY, FORGETTING),
        plots=(
            sweep("convergence", "Validation accuracy over the epochs of task 2", "learning rate", SPEED, groups),
            validation_curves("curves", "Validation accuracy of task 2 after every epoch", 2, groups),
            sweep("forgetting", "Forgetting against the first learning rate", "learning rate", FORGETTING, groups),
        ),
    )


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
        own_code(
            "rmnist",
            "rotated-23",
            "Replay, A-GEM and EWC in the setting of their own code",
            "The code of the baselines turns by 180 / 23 degrees per task, where stable SGD has 10, and trains 23 tasks.",
            step=0.0,
        ),
        own_code(
            "pmnist",
            "permuted-23",
            "Replay, A-GEM and EWC on permuted MNIST in the setting of their own code",
            "The code of the baselines trains 23 tasks and permutes all of them, where stable SGD has 20, the first "
            "of them plain.",
            first="permuted",
        ),
        first_experiment(),
        ingredients(),
        flatness(),
        fine_tuning(),
    ),
)
