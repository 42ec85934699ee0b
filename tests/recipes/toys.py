"""A small recipe whose rows match the invented records, and 001's Table 1."""

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
TABLE_1 = {  # of 001: after two and after eight tasks, mean and standard deviation over ten runs
    "LFL": (-0.73, 0.29, -0.92, 0.08), "LwF": (-0.14, 0.13, -0.80, 0.06), "SGD": (-0.20, 0.08, -0.66, 0.03),
    "IMM-mode": (-0.11, 0.08, -0.49, 0.05), "SGD-F": (-0.20, 0.15, -0.44, 0.06), "IMM-mean": (-0.12, 0.10, -0.42, 0.04),
    "EWC": (-0.08, 0.06, -0.25, 0.03), "PathNet": (-0.09, 0.16, -0.17, 0.23), "PNN": (-0.11, 0.10, -0.11, 0.01),
    "HAT": (-0.02, 0.03, -0.06, 0.01),
}  # fmt: skip
