"""A small recipe whose rows match the invented records."""

from hatrack.experiments.spec import Run
from hatrack.recipes.quantities import ratio, summary
from hatrack.recipes.recipe import Part, Published, Recipe, Row, above, percent

RATIO, ACCURACY = ratio(), summary("accuracy")


def row(label: str, method: str, **fields):
    return Row(label, Run("digits-and-clothes", method), (0, 1), **fields)


ROWS = (
    row("HAT", "hat", published={"accuracy": percent(80.0, 1.0), "ratio": Published(-0.1)}),
    row("SGD", "sgd", published={"accuracy": percent(60.0, 1.0), "ratio": Published(-0.5)}, note="It is plain."),
    row("EWC", "ewc", published={"ratio": Published(-0.3)}),
    row("joint", "joint", reference=True),
    row("random", "random", reference=True),
)
PART = Part(
    "table",
    "Table 1",
    "Two tasks.",
    ROWS,
    (ACCURACY, RATIO),
    {"accuracy": 0.005},
    claims=(
        above("HAT is better than SGD.", ACCURACY, "HAT", "SGD"),
        above("SGD is better than HAT.", ACCURACY, "SGD", "HAT"),
        above("HAT is better than EWC.", ACCURACY, "HAT", "EWC"),
    ),
)
RECIPE = Recipe("toy", "A toy paper", "Nobody 2026", "Two tasks & three <methods>.", (PART,))
