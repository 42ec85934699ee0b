"""What one experiment is: a Run says everything that decides its outcome. This module needs no torch."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from hatrack.benchmarks import BENCHMARKS
from hatrack.benchmarks.task_file import fingerprint
from hatrack.datasets.catalog import SETS
from hatrack.experiments.record import clean, name_of
from hatrack.files.atomic import file_digest
from hatrack.methods import METHODS
from hatrack.networks import NETWORKS, Init
from hatrack.options import LARGEST_WHOLE, Option, check, choose, complete, expect, shown, without_added_defaults
from hatrack.regime import Regime
from hatrack.registry import Registry, Scenario, source_digest, undefined

DIGESTS = ("data_digest", "method_digest", "network_digest", "weights_digest")  # of what a spec only names
TABLES: dict[str, Registry[Any]] = {"benchmark": BENCHMARKS, "network": NETWORKS, "method": METHODS}


@dataclass(frozen=True)
class Run:
    """The complete specification of an experiment. Options that are not given take their defaults.

    Args:
        benchmark: a name in `BENCHMARKS`.
        method: a name in `METHODS`, or a method of your own as "module:Class".
        seed: decides everything random.
        network: a name in `NETWORKS`; by default the benchmark's own.
        heads: "multi" for a head per task, "shared" for one head that all tasks share; in other scenarios than "task" there
            is always one head.
        init: the initial weights, "default" (PyTorch's) or "xavier".
        freeze: parts of the network that stay as they are: patterns of names, separated by commas.
        weights: a file with the weights of the trunk: a model that was kept, safetensors, or a state_dict of torch. A spec
            has the name of the file, without its folder, and its digest.
        trunk: "frozen" if no task changes the trunk: each trains its head, and adapters if there are such.
        adapters: the rank of the adapters beside the layers of the trunk, which is then frozen; 0 for none. See `lora`.
        adapter_layers: which layers have adapters: patterns of names, separated by commas.
        train_examples: on how many training examples per learned task the loss is measured after each task; 0 for all.
        watch_tasks: measure the accuracy on the test data of every task after each epoch; the curves of the record hold it.
        pretrain: a data set of the catalog on which the trunk is trained before the sequence; "" for none.
        pretrain_epochs: the epochs of this training; 0 for those of the regime.
        scenario: what is known of the task at test, and what labels mean: "task", "domain" or "class", see `in_scenario`.
        first_tasks: learn only the first so many tasks of the benchmark; 0 for all of them.
        only_task: learn only this task of the benchmark, named by its name or by its number from 0; "" for all tasks.
        router: measure the accuracy without a task id of a router with this kind of score: "distance", "both", "energy" or
            "entropy", for methods whose finished tasks never change; "none" for no router.
        regime: how every task is trained.
        benchmark_options: options of the benchmark, by name.
        network_options: options of the network, by name.
        method_options: options of the method, by name.

    Example:
        >>> spec = hr.Run("smnist", "hat", seed=1, regime=hr.Regime(epochs=2), benchmark_options={"data": "sample"})
        >>> record = hr.run(spec, "runs")
    """

    benchmark: str
    method: str
    seed: int = 0
    network: str = ""  # the benchmark's own
    heads: Annotated[Literal["multi", "shared"], Option("a head per task, or one that all tasks share")] = "multi"
    init: Annotated[Init, Option("initial weights: PyTorch's, or Xavier uniform with zero biases")] = "default"
    freeze: Annotated[str, Option("parts of the network that stay as they are: patterns of names, by commas")] = ""
    train_examples: Annotated[
        int, Option("training examples per learned task on which the loss is measured after each task; 0: all", low=0)
    ] = 2000
    watch_tasks: Annotated[bool, Option("measure the test accuracy of every task after each epoch", added=True)] = False
    pretrain: Annotated[str, Option("a data set on which the trunk is trained before the sequence", added=True)] = ""
    pretrain_epochs: Annotated[int, Option("epochs of the pretraining; 0: the regime's", low=0, added=True)] = 0
    scenario: Annotated[
        Scenario,
        Option("at test the task is known; or unknown, with the same labels in all tasks (domain) or all different (class)",
               added=True),
    ] = "task"  # fmt: skip
    first_tasks: Annotated[int, Option("only the first N tasks of the benchmark; 0: all", low=0, added=True)] = 0
    only_task: Annotated[str, Option("only this task of the benchmark: its name, or its number from 0", added=True)] = ""
    router: Annotated[
        Literal["none", "distance", "both", "energy", "entropy"],
        Option("find the task of test images by this score, and measure the accuracy without task id", added=True),
    ] = "none"
    weights: Annotated[
        str, Option("file with the weights of the trunk: a kept model, safetensors, or a state_dict of torch", added=True)
    ] = ""
    trunk: Annotated[
        Literal["learned", "frozen"], Option("frozen: tasks train their heads and adapters, not the trunk", added=True)
    ] = "learned"
    adapters: Annotated[
        int, Option("rank of adapters beside the layers of the trunk, which is frozen; 0: none", low=0, added=True)
    ] = 0
    adapter_layers: Annotated[str, Option("layers with adapters: patterns of names, by commas", added=True)] = "*"
    regime: Regime = field(default_factory=Regime)
    benchmark_options: Mapping[str, Any] = field(default_factory=dict)
    network_options: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed <= LARGEST_WHOLE:
            raise ValueError(f"seed must be a whole number from 0 to {LARGEST_WHOLE}, not {shown(self.seed)}")
        check(Run, vars(self))
        expect("regime", self.regime, Regime, "a Regime, such as Regime(epochs=20)")
        expect("network", self.network, str, "a name; '' for the benchmark's own")
        if self.pretrain:
            choose("data set", self.pretrain, SETS)
        elif self.pretrain_epochs:
            raise ValueError(f"pretrain_epochs is {self.pretrain_epochs}, but no data set is named by pretrain")
        if self.only_task and self.first_tasks:
            raise ValueError(f"first_tasks is {self.first_tasks}, but only_task names one task, {self.only_task!r}")
        self._check_trunk()
        object.__setattr__(self, "network", self.network or BENCHMARKS.about(self.benchmark).network)
        for kind, table in TABLES.items():
            entry = table.find(getattr(self, kind))
            object.__setattr__(self, kind, table.name_of(entry))  # one name, however it was written
            object.__setattr__(
                self, f"{kind}_options", complete(getattr(self, kind), entry, getattr(self, f"{kind}_options"))
            )
        if self.scenario != "task":
            object.__setattr__(self, "heads", "shared")
            if self.scenario not in (known := METHODS.find(self.method).scenarios):
                raise ValueError(undefined(self.method, self.scenario, known))

    def _check_trunk(self) -> None:
        """Raise a ValueError if the options of the trunk contradict each other. Adapters need a frozen trunk."""
        if self.adapters:
            object.__setattr__(self, "trunk", "frozen")
        elif self.adapter_layers != "*":
            raise ValueError(
                f"adapter_layers is {self.adapter_layers!r}, but there are no adapters: --adapters gives their rank"
            )
        if self.trunk == "frozen" and self.freeze:
            raise ValueError(f"freeze is {self.freeze!r}, but the whole trunk is frozen already")

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], own: Collection[str] = ()) -> Self:
        """Return the run that has this spec.

        Args:
            spec: the dict that a record or a saved state holds.
            own: methods of the user's own, "module:Class", that may be imported: a file alone never decides that.
        """
        if ":" in (method := str(spec["method"])) and method not in own:
            raise ValueError(f"its method is a user's own; --method {method} allows to import it")
        plain = {key: value for key, value in spec.items() if key not in DIGESTS}
        for key in ("benchmark_options", "network_options", "method_options"):
            plain[key] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain[key].items()}
        return cls(**{**plain, "regime": Regime(**plain["regime"])})

    @cached_property
    def spec(self) -> dict[str, Any]:
        """Everything that decides the outcome, as a dict for JSON."""
        plain = without_added_defaults(Run, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        plain["regime"] = without_added_defaults(Regime, dataclasses.asdict(self.regime))
        for kind, table in TABLES.items():
            plain[f"{kind}_options"] = without_added_defaults(table.find(plain[kind]), plain[f"{kind}_options"])
        if self.benchmark == "own":  # a file's name does not say what is in it
            plain["data_digest"] = fingerprint(self.benchmark_options["tasks"])
        if self.weights:
            plain["weights"], plain["weights_digest"] = Path(self.weights).name, file_digest(Path(self.weights))
        if (config := Path(self.network.partition(":")[2]) / "config.json").is_file():  # a folder of this machine
            plain["network"] = f"{self.network.partition(':')[0]}:{config.parent.resolve().name}"
            plain["network_digest"] = file_digest(config)
        if ":" in self.method:  # nor does a class's
            plain["method_digest"] = source_digest(METHODS.find(self.method))
        result: dict[str, Any] = clean(plain)
        return result

    @cached_property
    def name(self) -> str:
        """The name of its record: readable, and different for every different spec."""
        return name_of(self.spec)


def step_spec(run: Run) -> dict[str, Any]:
    """Return the part of a run's spec that the operations of its steps may depend on: all but the seed, and the options of
    its method that change none (`Method.same_step`)."""
    options, values = METHODS.find(run.method).same_step, run.spec["method_options"]
    kept = {name: value for name, value in values.items() if name not in options}
    return {**{key: value for key, value in run.spec.items() if key != "seed"}, "method_options": kept}
