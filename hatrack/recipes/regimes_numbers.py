"""Table 2 of the training-regimes paper (004): its numbers, the settings of stable SGD, and what is known of differences."""

from hatrack.recipes.recipe import Published, percent

RUNS = 5  # behind the numbers of Table 2
TOLERANCE = {"accuracy": 0.02, "forgetting_mirzadeh": 0.02}
RECENT = ("EWC", "A-GEM", "ER")
MEMORYLESS = {"naive SGD": "yes", "EWC": "yes", "A-GEM": "no", "ER": "no", "stable SGD": "yes", "multi-task": "N/A"}


def published(accuracy: float, std: float, forgetting: float, forgetting_std: float) -> dict[str, Published]:
    """Return the two numbers of a cell of Table 2."""
    lost = Published(forgetting, forgetting_std, RUNS)
    return {"accuracy": percent(accuracy, std, RUNS), "forgetting_mirzadeh": lost}


def together(accuracy: float, std: float) -> dict[str, Published]:
    """Return the two numbers of a cell of Table 2 about multi-task training, which forgets nothing."""
    return {"accuracy": percent(accuracy, std, RUNS), "forgetting_mirzadeh": Published(0.0, None, RUNS)}


NUMBERS = {  # Table 2: accuracy and forgetting, by benchmark
    "pmnist": {
        "naive SGD": published(44.4, 2.46, 0.53, 0.03),
        "EWC": published(70.7, 1.74, 0.23, 0.01),
        "A-GEM": published(65.7, 0.51, 0.29, 0.01),
        "ER": published(72.4, 0.42, 0.16, 0.01),
        "stable SGD": published(80.1, 0.51, 0.09, 0.01),
        "multi-task": together(86.5, 0.21),
    },
    "rmnist": {
        "naive SGD": published(46.3, 1.37, 0.52, 0.01),
        "EWC": published(48.5, 1.24, 0.48, 0.01),
        "A-GEM": published(55.3, 1.47, 0.42, 0.01),
        "ER": published(69.2, 1.10, 0.21, 0.01),
        "stable SGD": published(70.8, 0.78, 0.10, 0.02),
        "multi-task": together(87.3, 0.47),
    },
    "cifar100-20": {
        "naive SGD": published(40.4, 2.83, 0.31, 0.02),
        "EWC": published(42.7, 1.89, 0.28, 0.03),
        "A-GEM": published(50.7, 2.32, 0.19, 0.04),
        "ER": published(46.9, 0.76, 0.21, 0.03),
        "stable SGD": published(59.9, 1.81, 0.08, 0.01),
        "multi-task": together(64.8, 0.72),
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
NORMS_NOTE = {
    "cifar100-20": " Every task stays at chance at seed 0, and near it at seeds 1 and 2 (28 and 27 %): the statistics of "
    "batch norms that are gathered with dropout of 0.5 do not fit the evaluation, which has none. Gathered anew without "
    "dropout, the first three tasks have 33 to 38 % right after they were learned, the row stable SGD 53 to 57 % "
    "(python -m dev.dropout_and_norms, seed 0)."
}
MULTI_TASK = (
    "One epoch over all tasks together, in the regime of naive SGD; 004 does not say how it is trained. It learns all tasks "
    "at once and has none to forget, so that the forgetting of 0.0 in Table 2 is not measured. "
)
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
OTHERS = (
    "50,000 images per task, dropout also at test, other initial weights, a Fisher from the last batches. So this is not "
    "quite like with like"
)
REPLAY_NOTE = {
    "rmnist": "004 takes its baselines from another code: 23 tasks, rotations of 7.8 degrees per task in place of 10, "
    + OTHERS
    + ".",
    "pmnist": "004 takes its baselines from another code: 23 tasks, all of them permuted, where here the first of 20 is "
    "plain; " + OTHERS + "; `permuted-23` has its tasks, and is little nearer.",
}
OWN_CODE = (
    "That code also has 50,000 images per task, dropout at test, other initial weights and a Fisher from the last batches, "
    "which ours does not; which of them makes a difference is not known."
)
OWN_CODE_NOTE = {
    "rmnist": "With its tasks ER comes two points and A-GEM four points further from the published accuracy than with 20 "
    f"tasks that are 10 degrees apart, so that A-GEM agrees there may be chance. {OWN_CODE}",
    "pmnist": "With its tasks ours come at most three points nearer to the published accuracy than with 20, so that the "
    f"tasks explain little of it. {OWN_CODE} The published accuracy and forgetting of ER add up to 88 %, which is about "
    "what a task had at its best; ours has 95.7 % right after it was learned. So theirs learned every task less well. Those "
    "of A-GEM and EWC, which dropped at test as well, add up to 95 and 94 %, so that this is hardly the reason; it was not "
    "tried.",
}
CIFAR_REPLAY_NOTE = (
    "004 takes its baselines from another code, which it adapted. In the version that we read, that code has tasks of four "
    "classes (100 // 23) drawn by the seed, 2,000 images per task, pixels less their mean image, a ResNet-18 and initial "
    "weights of its own, a Fisher from the last batches, and for A-GEM and ER all of a memory of 80 images in every step, "
    "where ours draws 64 of 100. As we read it, it stops with an error before the first step (the network is built without "
    "arguments that it asks for), so that Table 2 seems to be of another version. Ours has the block of 004's own code, "
    "whose second convolution is never called. So this is not like with like, and what of it makes a difference is not "
    "known."
)
CLASSES = (
    "The paper says that a task has 5 random classes (without replacement); its code takes the classes in their order, and "
    "so do all rows here but one."
)
RANDOM = (
    "Classes drawn by the seed, as the paper says; all else as in the row stable SGD. At each of the three seeds it is 2 "
    "to 5 points below the classes in their order, which the code takes; we believe that the paper has numbers of those."
)
