"""HAT on ResNet-18 with batch norms per task (000): Dinu 2019. It shows a figure and states claims, but no numbers."""

from dataclasses import replace
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.recipes.grids import difference, loss_matrix, ratio_by_tasks
from hatrack.recipes.plots import ratio_lines, sweep
from hatrack.recipes.quantities import largest_loss, ratio, summary
from hatrack.recipes.recipe import Part, Recipe, Row, above, below
from hatrack.regime import Regime

RATIO, LEARNING = ratio(), summary("learning")
EPOCHS = 15  # per task, of residual networks


def resnet(method: str, network: str = "resnet18", *, epochs: int = EPOCHS, **options: Any) -> Run:
    """Return the run of a method on a residual network."""
    return Run("cifar", method, network=network, regime=Regime(epochs=epochs), method_options=options)


def alexnet(method: str, **options: Any) -> Run:
    """Return the run of a method on the AlexNet of 001, in its regime."""
    return Run("cifar", method, method_options=options)


OWN_JOINT: dict[str, Any] = {"joint": ("resnet joint",)}
FIGURE_4 = (
    Row("alexnet-sgd", alexnet("sgd")),
    Row("alexnet-hat", alexnet("hat")),
    Row("alexnet-pnn", alexnet("pnn", columns="budget"), (0,)),
    Row("resnet-sgd", resnet("sgd"), (0,), **OWN_JOINT),
    Row("resnet-hat", resnet("hat", norms="shared"), (0,), **OWN_JOINT, note="With batch norms that all tasks share."),
    Row("resnet-hat-bn", resnet("hat"), (0,), **OWN_JOINT, note="With batch norms per task."),
    Row("joint", alexnet("joint"), (0,), reference=True),
    Row("joint, all tasks", alexnet("joint", at=(10,)), (1, 2), reference=True),
    Row("resnet joint", resnet("joint", at=(10,)), (0,), reference=True, **OWN_JOINT),
    Row("random", alexnet("random"), reference=True),
)


def _all_but(label: str) -> list[str]:
    return [row.label for row in FIGURE_4 if row.label != label and not row.reference]


DEPTHS = {"resnet18": 18, "resnet34": 34, "resnet50": 50}
PRICES = (0.1, 0.25, 0.75)


def _depth_rows() -> tuple[Row, ...]:
    rows = []
    for network, depth in DEPTHS.items():
        rows.append(Row(f"SGD, {network}", resnet("sgd", network), (0,), x=depth))
        rows.append(Row(f"HAT, {network}", resnet("hat", network), (0,), x=depth))
    return tuple(rows)


def _price_rows() -> tuple[Row, ...]:
    rows = [Row(f"HAT, c = {c:g}", resnet("hat", c=c), (0,), x=c) for c in PRICES]
    return (*rows, replace(FIGURE_4[3], label="SGD"))


RECIPE = Recipe(
    "hat-resnet",
    "000: HAT on ResNet-18",
    "a report by M.-C. Dinu, 2019",
    "Hard attention to the task moved from AlexNet to ResNet-18, whose batch norms are then needed once per task. The "
    "report shows one figure without numbers and leaves two questions open, each with a part here. Residual networks are "
    "trained for "
    f"{EPOCHS} epochs per task at most, AlexNet for 200, both with 001's learning rates; the report does not state its own.",
    (
        Part(
            "figure-4",
            "Figure 4: forgetting ratios of AlexNet and ResNet-18",
            "Each network has its own joint training as its reference. Joint training of ResNet-18 is fitted on all ten "
            "tasks only, so that its ratios exist for t = 10.",
            FIGURE_4,
            (RATIO, summary("accuracy"), LEARNING, summary("forgetting"), largest_loss()),
            claims=(
                above("AlexNet with HAT performs best.", RATIO, "alexnet-hat", *_all_but("alexnet-hat")),
                above("ResNet-HAT-BN is significantly better than ResNet-SGD.", RATIO, "resnet-hat-bn", "resnet-sgd"),
                below("ResNet-HAT without norms per task is worse than ResNet-SGD.", RATIO, "resnet-hat", "resnet-sgd"),
                below(
                    "A task is learned slightly worse with HAT than with plain SGD.", LEARNING, "resnet-hat-bn", "resnet-sgd"
                ),
            ),
            plots=(ratio_lines(title="Figure 4: forgetting ratio against tasks learned"),),
            grids=(ratio_by_tasks, loss_matrix("resnet-hat"), loss_matrix("resnet-hat-bn")),
        ),
        Part(
            "short",
            "Norms per task or shared, four epochs per task",
            "A first look, before figure 4: what becomes of HAT on ResNet-18 if all tasks share their batch norms.",
            (
                Row("norms per task", resnet("hat", epochs=4), (0, 1)),
                Row("norms shared", resnet("hat", epochs=4, norms="shared"), (0, 1)),
            ),
            (summary("accuracy"), LEARNING, summary("forgetting"), largest_loss()),
        ),
        Part(
            "depth",
            "An open question of 000: does the gap to SGD grow with depth?",
            "The accuracy on each task immediately after it was learned. One seed at least.",
            _depth_rows(),
            (LEARNING, summary("accuracy"), summary("forgetting")),
            plots=(sweep("depth", "Learning accuracy against depth", "layers", LEARNING, ("SGD", "HAT")),),
            grids=(
                difference(
                    "HAT less SGD, learning accuracy in points",
                    [(name, f"HAT, {name}", f"SGD, {name}") for name in DEPTHS],
                    LEARNING,
                ),
            ),
        ),
        Part(
            "c",
            "An open question of 000: does the gap to SGD come from a price c that is too high?",
            "ResNet-18 with norms per task. One seed at least.",
            _price_rows(),
            (LEARNING, summary("accuracy"), summary("forgetting")),
            plots=(sweep("c", "Learning accuracy against c", "c", LEARNING, ("HAT",)),),
            grids=(
                difference(
                    "HAT less SGD, learning accuracy in points",
                    [(f"c = {c:g}", f"HAT, c = {c:g}", "SGD") for c in PRICES],
                    LEARNING,
                ),
            ),
        ),
    ),
)
