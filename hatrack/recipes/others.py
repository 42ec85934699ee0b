"""Numbers besides the five papers: SI by its authors' code, and every method of this library on one small sequence."""

from collections.abc import Iterator
from typing import Any

from hatrack.experiments.spec import Run
from hatrack.methods import METHODS
from hatrack.recipes.quantities import parameters_per_task, summary
from hatrack.recipes.recipe import Part, Recipe, Row, percent
from hatrack.regime import Regime
from hatrack.registry import Scenario

ACCURACY, LEARNING, FORGETTING = summary("accuracy"), summary("learning"), summary("forgetting")
PER_TASK = parameters_per_task()
SMALL: dict[str, Any] = {"widths": (300, 300), "dropout": 0.0, "input_dropout": 0.0}
REFERENCES = ("joint", "random")


def si_permuted(c: float) -> Run:
    """Return SI on permuted MNIST as its authors' code trains it."""
    return Run(
        "pmnist",
        "si",
        heads="shared",
        init="xavier",
        regime=Regime(epochs=20, batch=256, optimizer="adam", lr=0.001, schedule="constant", keep_state=True),
        benchmark_options={"first": "plain", "normalise": False, "valid": 0.0},
        network_options={"dropout": 0.0, "input_dropout": 0.0},
        method_options={"c": c},
    )


SI_NOTE = "Of Avalanche's baseline only this rounded number is known to us; why ours is higher is not."


def si_split() -> Run:
    """Return SI on five pairs of digits, in the regime of Avalanche's baseline."""
    return Run(
        "smnist",
        "si",
        regime=Regime(epochs=10, optimizer="adam", lr=0.001, schedule="constant"),
        benchmark_options={"tasks": 5, "valid": 0.0},
        network_options={"widths": (256, 256), "dropout": 0.0, "input_dropout": 0.0},
        method_options={"c": 1.0, "xi": 0.001},
    )


def small(method: str) -> Run:
    """Return a method on the demonstration's sequence, with its default options."""
    options = {"data": "sample"}
    return Run("digits-and-clothes", method, regime=Regime(epochs=10), benchmark_options=options, network_options=SMALL)


def transformer(method: str, **options: Any) -> Run:
    """Return a method on CIFAR-100 in five tasks with a vision transformer."""
    regime = Regime(epochs=20, optimizer="adamw", lr=0.001)
    return Run("cifar100-5", method, network="vit", regime=regime, method_options=options)


def on_a_trunk(method: str, *, start: str = "cifar10", **changes: Any) -> Run:
    """Return a method on CIFAR-100 in five tasks, with a trunk that is trained on CIFAR-10 first.

    Args:
        method: the method.
        start: the data set on which the trunk is trained first; "" for none.
        changes: further arguments of the run.
    """
    before: dict[str, Any] = {"pretrain": start, "pretrain_epochs": 30} if start else {}
    return Run("cifar100-5", method, network="alexnet", regime=Regime(epochs=25), **before, **changes)


def recurrent(method: str, **options: Any) -> Run:
    """Return a method on split MNIST, sample images, with a recurrent network that reads rows."""
    regime = Regime(epochs=20, optimizer="adamw", lr=0.003)
    network = {"width": 64, "layers": 1}
    return Run(
        "smnist", method, network="gru", regime=regime, method_options=options,
        benchmark_options={"data": "sample"}, network_options=network,
    )  # fmt: skip


STRENGTHS: dict[str, dict[Scenario, float]] = {  # of van de Ven's code, by scenario
    "ewc": {"task": 1e5, "domain": 1e10, "class": 1e9},
    "si": {"task": 10.0, "domain": 5e4, "class": 5e3},
}
IN_SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {  # label, and the options that all scenarios have
    "sgd": ("none", {}),
    "ewc": ("EWC", {"limit": 0.0, "estimator": "expected"}),
    "si": ("SI", {"xi": 0.1}),
    "lwf": ("LwF", {"strength": 1.0, "temperature": 2.0, "term": "per-task"}),
    "er": ("ER", {"memory": 1000, "replay": 128}),
    "derpp": ("DER++", {"memory": 1000, "replay": 64}),
    "joint": ("joint", {"at": (5,)}),
}
PUBLISHED: dict[Scenario, dict[str, float]] = {
    "task": {"sgd": 84.3, "ewc": 99.1, "si": 99.2, "lwf": 99.6, "joint": 99.7},
    "domain": {"sgd": 60.1, "ewc": 63.0, "si": 66.9, "lwf": 71.2, "joint": 98.6},
    "class": {"sgd": 19.9, "ewc": 20.6, "si": 21.2, "lwf": 21.9, "joint": 98.2},
}


NOTES = {
    "sgd": "In `task` it hangs on the order of the digits, which the seed draws. Why it is higher there than published is "
    "not known.",
    "si": "The authors' code takes the gradient of the whole loss, with the penalty, for the path integral; here it is "
    "that of the plain loss, as in SI's paper.",
    "lwf": "In `domain`, five seeds lie between 73 and 87 %, by the order of the digits. Why all methods but `joint` are "
    "higher than published in `domain`, though they are near it in `class`, is not known.",
}


def in_a_scenario(scenario: Scenario, method: str) -> Run:
    """Return a method on split MNIST in one of the three scenarios, trained as in the comparison of van de Ven et al."""
    options = dict(IN_SCENARIOS[method][1])
    if method in STRENGTHS:
        options["strength" if method == "ewc" else "c"] = STRENGTHS[method][scenario]
    return Run(
        "smnist",
        method,
        scenario=scenario,
        regime=Regime(steps=2000, batch=128, optimizer="adam", lr=0.001, schedule="constant", keep_state=True, clip=0.0),
        benchmark_options={"tasks": 5, "valid": 0.0, "normalise": False, "order": "seed"},
        network_options={"widths": (400, 400), "dropout": 0.0, "input_dropout": 0.0},
        method_options=options,
    )


def scenario_rows() -> Iterator[Row]:
    """Yield the rows of the part on scenarios."""
    for scenario, published in PUBLISHED.items():
        for method, (label, _) in IN_SCENARIOS.items():
            yield Row(
                f"{scenario}: {label}",
                in_a_scenario(scenario, method),
                (0, 1, 2, 3, 4),
                {"accuracy": percent(published[method], runs=20)} if method in published else {},
                NOTES.get(method, ""),
                reference=method in REFERENCES,
            )


RECIPE = Recipe(
    "others",
    "Besides the five papers",
    "Zenke et al. 2017, and this library",
    "Numbers of synaptic intelligence (SI) that its authors' code stores, every method of this library on one small "
    "sequence, HAT on a transformer and on a recurrent network, and adapters on a pretrained trunk.",
    (
        Part(
            "si-permuted",
            "SI on ten permuted MNIST tasks, one head",
            "The published numbers are the stored results of the authors' code. c = 0 is no penalty at all; what is "
            "forgotten then depends on the initial weights.",
            (
                Row("SI, c = 0.1", si_permuted(0.1), published={"accuracy": percent(96.94)}),
                Row("SI, c = 0", si_permuted(0.0), published={"accuracy": percent(57.41)}),
            ),
            (ACCURACY, FORGETTING),
            {"accuracy": 0.005},
        ),
        Part(
            "si-split",
            "SI on split MNIST, five pairs, with task ids",
            "The published number is that of another library (Avalanche's baselines).",
            (Row("SI, c = 1", si_split(), published={"accuracy": percent(97.0)}, note=SI_NOTE),),
            (ACCURACY, FORGETTING),
            {"accuracy": 0.005},
        ),
        Part(
            "scenarios",
            "The three scenarios: split MNIST, five pairs",
            "Two layers of 400 units, 2,000 steps of 128 images per task, Adam at 0.001 whose state is kept from task to "
            "task, pixels from 0 to 1, digits in an order drawn from the seed. The published numbers are quoted from memory "
            "(van de Ven, Tuytelaars, Tolias 2022) and should be taken as such; the strengths of EWC, SI and LwF are those "
            "of the authors' code. ER and DER++ have a memory of 1,000 images. `joint` is trained once, on all tasks. The "
            "[scenarios](../scenarios.md) are explained on a page of their own.",
            tuple(scenario_rows()),
            (ACCURACY, LEARNING, FORGETTING),
            {"accuracy": 0.02},
        ),
        Part(
            "every-method",
            "Every method on one small sequence",
            "Six tasks of three classes of digits and clothes, sample images, ten epochs, default options. Ten epochs of "
            "plain SGD suit some methods better than others (SI's defaults belong to long runs with Adam; stable SGD lacks "
            "the dropout that is a part of it), and PackNet, PathNet and DEN train a task in several fits, so longer: this "
            "shows that each works, not which is best.",
            tuple(Row(name, small(name), reference=name in REFERENCES) for name in METHODS),
            (ACCURACY, LEARNING, FORGETTING),
        ),
        Part(
            "transformer",
            "HAT on a vision transformer, CIFAR-100 in five tasks",
            "20 epochs per task of AdamW at 0.001. `joint` is trained once, on all tasks together, also for 20 epochs, at "
            "whose end its learning rate has not fallen yet: it is no upper reference here.",
            (
                Row("HAT", transformer("hat")),
                Row("independent", transformer("independent")),
                Row("joint", transformer("joint", at=(5,)), reference=True),
            ),
            (ACCURACY, LEARNING, FORGETTING),
        ),
        Part(
            "router",
            "HAT without a task id, CIFAR-100 in five tasks",
            "The AlexNet-like network, 200 epochs at most. Without a task id the best logit of all heads decides, or the "
            "[router](../router.md) by distances, which is worse here.",
            (Row("HAT", Run("cifar100-5", "hat", router="distance")),),
            (ACCURACY, summary("without_task_id"), summary("routed")),
        ),
        Part(
            "adapters",
            "Adapters on a trunk trained on CIFAR-10, CIFAR-100 in five tasks",
            "The AlexNet-like trunk is trained on CIFAR-10 for 30 epochs, at one seed in the same way for all rows; then "
            "each of the five groups of CIFAR-100 is trained for 25 epochs. `lora` has adapters of rank 8 per task. HAT "
            "gates adapters of rank 40 that the five tasks share, which are as many weights. `frozen` trains heads only. "
            "Parameters per task are all that a method keeps, the trunk included, divided by the number of tasks. Nothing "
            "was tuned: all rows have plain SGD at 0.05 and use all their epochs. HAT has two rows and LoRA one, and to "
            "take HAT's better one would be a choice on test data.",
            (
                Row("LoRA, rank 8", on_a_trunk("lora", trunk="frozen", method_options={"rank": 8})),
                Row("HAT on adapters, rank 40", on_a_trunk("hat", adapters=40)),
                Row("HAT on adapters, rank 40, c = 0.1", on_a_trunk("hat", adapters=40, method_options={"c": 0.1})),
                Row("frozen", on_a_trunk("frozen", trunk="frozen")),
                Row("independent, from the trunk", on_a_trunk("independent")),
                Row("independent, from initial weights", on_a_trunk("independent", start="")),
            ),
            (ACCURACY, PER_TASK, FORGETTING),
        ),
        Part(
            "recurrent",
            "HAT on a recurrent network, split MNIST read row by row",
            "One layer of 64 gated units, sample images, 20 epochs per task of AdamW at 0.003.",
            (
                Row("HAT", recurrent("hat")),
                Row("independent", recurrent("independent")),
                Row("joint", recurrent("joint", at=(2,)), reference=True),
            ),
            (ACCURACY, LEARNING, FORGETTING),
        ),
    ),
)
