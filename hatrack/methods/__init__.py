"""Methods: one paper, one file. The table METHODS is written out by hand; nothing registers itself."""

from typing import TYPE_CHECKING

from hatrack.registry import Entry, Registry

if TYPE_CHECKING:
    from hatrack.methods.method import Method

METHODS: "Registry[type[Method]]" = Registry("method", {
    "sgd": Entry(
        "hatrack.methods.method:Method",
        "Plain sequential SGD: each task is trained in turn and nothing protects the earlier ones.",
        paper="the baseline of all five",
        needs="task id at test, unless the head is shared",
        costs="nothing",
    ),
    "frozen": Entry(
        "hatrack.methods.frozen:Frozen",
        "The trunk is trained on the first task only; every later task trains its own head on those features.",
        paper="the HAT paper's SGD-F (001)",
        needs="task id at test",
        costs="nothing",
    ),
    "independent": Entry(
        "hatrack.methods.independent:Independent",
        "A fresh network per task, all starting from the same weights: nothing shared, nothing forgotten.",
        paper="the HAT authors' sgd-restart (001)",
        needs="task id at test",
        costs="a whole trunk per task",
    ),
    "joint": Entry(
        "hatrack.methods.joint:Joint",
        "Every new task: start again from the initial weights and train on all tasks so far, mixed in every batch.",
        paper="the upper reference of 001",
        needs="all data of all tasks at once; task id at test, unless the head is shared",
        costs="the data of every task",
    ),
    "random": Entry(
        "hatrack.methods.random:Random",
        "Guesses a class with the frequency it had in the task's training data; nothing is trained.",
        paper="the lower reference of 001",
        needs="task id at test",
        costs="a frequency per class",
    ),
    "hat": Entry(
        "hatrack.methods.hat:HAT",
        "Hard attention to the task: gates per unit and task; what a finished task uses is frozen.",
        paper="Serra et al. 2018 (001)",
        needs="task id at test",
        costs="an embedding and a gate per unit and task, and norms per task",
    ),
    "pmask": Entry(
        "hatrack.methods.pmask:PMASK",
        "Hard attention on single parameters: a gate per weight and task; the weights that a finished task uses are frozen.",
        paper="Raskoti, Ghimire (003)",
        needs="task id at test",
        costs="an embedding per weight while a task is learned, then one bit per weight and task",
    ),
    "ewc": Entry(
        "hatrack.methods.ewc:EWC",
        "Elastic weight consolidation: the more an earlier task cares about a weight, the stiffer the spring that holds it.",
        paper="Kirkpatrick et al. 2017 (002)",
        needs="task id at test, unless the head is shared",
        costs="two numbers per weight; after a task, one pass over its data",
    ),
    "imm-mean": Entry(
        "hatrack.methods.imm_mean:IMMMean",
        "Incremental moment matching by the mean: after each task the weights become the mean over the tasks so far.",
        paper="Lee et al. 2017 (001)",
        needs="task id at test, unless the head is shared",
        costs="one number per weight",
    ),
    "imm-mode": Entry(
        "hatrack.methods.imm_mode:IMMMode",
        "Incremental moment matching by the mode: after each task the weights become the tasks' mean by Fisher information.",
        paper="Lee et al. 2017 (001)",
        needs="task id at test, unless the head is shared",
        costs="two numbers per weight; after a task, one pass over its data",
    ),
    "si": Entry(
        "hatrack.methods.si:SI",
        "Synaptic intelligence: a weight that earned much of the fall of earlier losses is held by a stiff spring.",
        paper="Zenke et al. 2017",
        needs="task id at test, unless the head is shared",
        costs="five numbers per weight, of which three are saved",
    ),
    "mas": Entry(
        "hatrack.methods.mas:MAS",
        "Memory aware synapses: a weight that the answers to earlier tasks are sensitive to is held by a stiff spring.",
        paper="Aljundi et al. 2018",
        needs="task id at test, unless the head is shared",
        costs="two numbers per weight; after a task, a gradient for every example",
    ),
    "lwf": Entry(
        "hatrack.methods.lwf:LwF",
        "Learning without forgetting: on the images of a new task, the earlier tasks' heads go on answering as before.",
        paper="Li, Hoiem 2016 (baseline of 001)",
        needs="task id at test, unless the head is shared",
        costs="a second copy of the network while a task is learned",
    ),
    "lfl": Entry(
        "hatrack.methods.lfl:LFL",
        "Less-forgetting learning: on the images of a new task, the trunk's features stay near what they were before it.",
        paper="Jung et al. 2016 (baseline of 001)",
        needs="task id at test, unless the head is shared",
        costs="a second copy of the trunk while a task is learned",
    ),
    "agem": Entry(
        "hatrack.methods.agem:AGEM",
        "Averaged gradient episodic memory: no step goes against the mean gradient of what is remembered.",
        paper="Chaudhry et al. 2019",
        needs="a memory of images; task id at test, unless the head is shared",
        costs="the images in memory, and a second gradient per step",
    ),
    "er": Entry(
        "hatrack.methods.er:ER",
        "Experience replay: every batch is joined by some examples from a small memory of all that was seen.",
        paper="Chaudhry et al. 2019",
        needs="a memory of images; task id at test, unless the head is shared",
        costs="the images in memory, and a longer batch",
    ),
    "derpp": Entry(
        "hatrack.methods.derpp:DERpp",
        "Dark experience replay: kept examples are answered with the logits that they had, and with their labels.",
        paper="Buzzega et al. 2020",
        needs="a memory of images; task id at test, unless the head is shared",
        costs="the images in memory and their logits, and two more passes per step",
    ),
    "stable-sgd": Entry(
        "hatrack.methods.stable_sgd:StableSGD",
        "SGD in the stable regime: a large first learning rate that falls from task to task, small batches, dropout.",
        paper="Mirzadeh et al. 2020 (004)",
        needs="dropout layers in the network, for that ingredient; task id at test, unless the head is shared",
        costs="nothing",
    ),
    "packnet": Entry(
        "hatrack.methods.packnet:PackNet",
        "Iterative pruning: every task owns a share of the weights that were free, and reads those of the tasks before it.",
        paper="Mallya and Lazebnik 2018",
        needs="task id at test",
        costs="the number of a task per weight; the norms of every task",
    ),
    "den": Entry(
        "hatrack.methods.den:DEN",
        "Dynamically expandable networks: selective retraining, new units when needed, copies of units that drift.",
        paper="Yoon et al. 2018",
        needs="task id at test; a trunk of linear layers",
        costs="new units, at most 2 x expand per layer and task",
    ),
    "pathnet": Entry(
        "hatrack.methods.pathnet:PathNet",
        "PathNet: every task goes through a few modules of each layer, found by a tournament and frozen afterwards.",
        paper="Fernando et al. 2017",
        needs="task id at test; a sequential trunk; validation data, to tell the better path",
        costs="up to twice the epochs; a path per task",
    ),
    "pnn": Entry(
        "hatrack.methods.pnn:PNN",
        "Progressive neural networks: a column per task that reads the frozen columns of all earlier tasks.",
        paper="Rusu et al. 2016",
        needs="task id at test; a sequential trunk",
        costs="a column per task, with laterals from every earlier one",
    ),
}, base="hatrack.methods.method:Method")  # fmt: skip
