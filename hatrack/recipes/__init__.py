"""Recipes: the tables and figures of the five papers, each as runs with the published numbers beside them."""

from typing import TYPE_CHECKING

from hatrack.registry import Entry, Registry

if TYPE_CHECKING:
    from hatrack.recipes.recipe import Recipe

RECIPES: "Registry[Recipe]" = Registry("recipe", {
    "hat-2018": Entry(
        "hatrack.recipes.hat_2018:RECIPE",
        "Hard attention to the task against nine approaches on sequences of image sets.",
        paper="Serrà et al. 2018 (001)",
    ),
    "hat-resnet": Entry(
        "hatrack.recipes.hat_resnet:RECIPE",
        "HAT on AlexNet and ResNet-18, with batch norms per task and with shared ones.",
        paper="Dinu 2019 (000)",
    ),
    "ewc-cnn": Entry(
        "hatrack.recipes.ewc_cnn:RECIPE",
        "Elastic weight consolidation on a convolutional network and permuted MNIST.",
        paper="002",
    ),
    "pmask": Entry(
        "hatrack.recipes.pmask:RECIPE",
        "Hard attention on single parameters, on CIFAR-10 and CIFAR-100 in five tasks.",
        paper="Raskoti, Ghimire (003)",
    ),
    "regimes": Entry(
        "hatrack.recipes.regimes:RECIPE",
        "Stable and plastic training regimes against replay, A-GEM and EWC, twenty tasks of one epoch.",
        paper="Mirzadeh et al. 2020 (004)",
    ),
    "others": Entry(
        "hatrack.recipes.others:RECIPE",
        "Besides the five papers: SI by its authors' code, and every method on one small sequence.",
        paper="Zenke et al. 2017, and this library",
    ),
})  # fmt: skip
