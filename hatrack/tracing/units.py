"""The units of any network, and the weights between them: found by running it once on an example, so nobody lists layers.

Units are the outputs of linear, convolutional and recurrent layers, numbered 0, 1, 2, ...; a norm that acts on a sum of
several units has units of its own. Every unit has a gate behind its layer, or behind the batch norms if only these read it.

Example: `nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))` has the units 0, 1, 2 (first layer) and 3, 4 (second).
The weight from unit 1 to unit 3 matters to a task only if the gates of both are open: if gate 1 is closed, the weight is
multiplied by relu(0) = 0; if gate 3 is closed, its result is multiplied by 0. So masks of units give masks of weights, and
training all other weights leaves the outputs of the task the same, bit for bit. `dependencies.py` explains how we know which
units feed an input of a layer when there are shortcuts, pooling or concatenations in between.

Positions, class tokens and the like have units of their own, and small parameters such as scales are left to the tasks, each
of which has its own (see `parameters.py`). If we cannot analyse how another parameter is used (computed weights), it is
frozen entirely after the first task, or refused with an error that names it. Both the rules and the gates are checked on the
example at construction.
"""

import copy
import fnmatch
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hatrack.seeds import generator, seeded
from hatrack.tracing.dependencies import ALWAYS_ACTIVE
from hatrack.tracing.exchange import filled, functional_call
from hatrack.tracing.folded import FoldedGates, LastPass
from hatrack.tracing.gates import (
    ApplyGates,
    Gate,
    Key,
    Places,
    not_on_example,
    only_in_training,
    tensor_names,
)
from hatrack.tracing.lengths import Example, trace_example
from hatrack.tracing.mask_tables import MaskTables
from hatrack.tracing.parameters import per_task_parameters
from hatrack.tracing.recurrent import FusedGate
from hatrack.tracing.trace import Use
from hatrack.tracing.tracker import DependencyTracker
from hatrack.tracing.training_pass import written_in_training
from hatrack.tracing.wrappers import check_copy, check_modules

LEFT = "left out by"  # the reason for what the user leaves out, and the pattern
LARGE = 10**6  # weights: a network with more of them is checked with fewer random masks


class Units:
    """The units of a trunk, the weights between them, and the trunk's forward pass with a gate on every unit.

    Args:
        trunk: a module that maps a batch of inputs to a batch of features.
        example: one or more inputs, on which the trunk is traced.
        on_unknown: what to do with parameters whose use cannot be analysed: "freeze" them, or raise an "error".
        leave: parameters to freeze entirely, as names or patterns separated by commas: "attention.*, embedding".

    Attributes:
        count: the number of units.
        layers: the units of every layer, by name.
        places: where gates are applied, by call (see `gates.py`).
        features: (features...), the set id of every feature.
        traced: the names of the parameters for which weight masks hold; those of norms are not among them.
        frozen_entirely: the names of the parameters that are frozen entirely, with the reason.
        per_task: the names of the scales and other small parameters that each task must have for itself.
        reads: the lines at which the trunk reads values of its input into Python.
        uses: which weights connect which units.
        layout: of every parameter the position of its storage among all parameters, its shape, strides and offset.
        norm_inputs, norm_units, beside: what else shows which channels belong to which units (see `labels.py`).
    """

    def __init__(
        self, trunk: nn.Module, example: Tensor, *, on_unknown: Literal["freeze", "error"] = "freeze", leave: str = ""
    ) -> None:
        check_modules(trunk)
        self.trunk = trunk
        twin = copy.deepcopy(trunk).cpu().eval()
        x = example[:2].cpu() if len(example) > 1 else torch.cat([example, example]).cpu()
        check_copy(copy.deepcopy(twin), x, trunk)
        written = written_in_training(copy.deepcopy(twin), x)
        trace, features, gated = trace_example(twin, x, written)
        tracker, table = trace.tracker, trace.table
        self.count, self.layers, self.places = table.count, table.layers, Places(trace.final_gates(features))
        if not self.count:
            raise ValueError(
                f"the trunk has no linear, convolutional or recurrent layer whose units could be gated{_why(tracker)}"
            )
        self.features = tracker.dependencies.reduce(tracker.set_ids(features), [0])[0]
        self.reads = tracker.reads
        self.norm_inputs, self.norm_units, self.beside = trace.norm_inputs, trace.norm_units, tracker.beside
        self.uses = trace.uses
        self._unused = _unused(trace.uses, tracker.total)
        self.layout = {n: (tracker.first[n], p.shape, p.stride(), p.storage_offset()) for n, p in twin.named_parameters()}
        self._members = _padded(tracker.dependencies.sets)
        self._tables = self._near = MaskTables(self.uses, self._unused == 1, self._members)
        small = per_task_parameters(tracker, dict(twin.named_parameters()))
        unknown = {name: operation for name, operation in tracker.untraceable.items() if name not in small}
        self.frozen_entirely = self._find_frozen_entirely(twin, unknown, on_unknown, leave)
        self.per_task = small - set(self.frozen_entirely)
        self.traced = set(self.layout) - trace.norms - self.per_task
        held = {*self.frozen_entirely, *self.per_task, *trace.norms}
        self._example = Example(table, self.uses, self._unused, self.places, self.features, held, gated, written)
        self._repeated = {name: n for name, n in trace.counts.items() if n > 1 and name in set(trace.names.values())}
        self._shape = x.shape[1:]
        self._other_calls: set[tuple[Any, ...]] = set()  # the shapes and numbers of calls for which the masks hold, too
        self._check(twin, x)

    def to(self, device: torch.device) -> None:
        """Move the tensors that `run` needs to a device, and the tables of masks."""
        self.places, self._near = self.places.to(device), self._tables.to(device)

    @property
    def gates(self) -> dict[Key, Gate | FusedGate | None]:
        """The gate of every call that was traced on the example."""
        return self.places.gates

    @property
    def sets(self) -> int:
        """How many dependency sets there are, counted from 0."""
        return len(self._members)

    @property
    def positions(self) -> int:
        """How many elements the parameters have."""
        return len(self._unused)

    @property
    def gated(self) -> set[str]:
        """The names of the parameters that have units of their own, such as positions."""
        return set(self._example.gated)

    def weights_of(self, layer: str) -> tuple[str, ...]:
        """Return the names of the parameters that write the units of a layer."""
        return self._example.table.weights.get(layer, (f"{layer}.weight",))

    def on_copy(self, trunk: nn.Module) -> "Units":
        """Return the same units for a copy of the trunk."""
        units = copy.copy(self)
        units.trunk = trunk
        return units

    def check_training(self, twin: nn.Module, x: Tensor) -> None:
        """Raise an error in one line if the trunk calls something in training mode that the example did not show.

        Args:
            twin: a copy of the trunk, in training mode.
            x: inputs; what a trunk calls only for others, or by chance, is refused in training.
        """
        with seeded(0, "units"), torch.enable_grad():
            self._run(twin, x, torch.ones(self.count, dtype=torch.bool, device=x.device), {})

    def run(self, x: Tensor, gates: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run the trunk with gates.

        Args:
            x: a batch of inputs.
            gates: (units,), the value of every unit's gate. Bools select, so that not even an infinity passes a closed
                gate; other types multiply.
            tensors: parameters and buffers to use in place of the trunk's own, by name.

        Returns:
            The features of the batch.
        """
        return self._run(self.trunk, x, gates, tensors or {})

    def run_folded(self, x: Tensor, gates: Tensor, tensors: Mapping[str, Tensor], last: LastPass) -> Tensor:
        """Run the trunk with gates that multiply, as `run` but for rounding, at less cost (see `folded.py`).

        Args:
            x: a batch of inputs.
            gates: (units,), the value of every unit's gate.
            tensors: parameters and buffers to use in place of the trunk's own, by name.
            last: what the last pass has left, which this one brings up to date.
        """
        calls = FoldedGates(self.trunk, tensors, self.places, gates, [*self.layers.values()], last)
        features = self._run_in(calls, self.trunk, x, tensors)
        last.called = calls.called
        return features

    def _run(self, trunk: nn.Module, x: Tensor, gates: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        layers = [*self.layers.values()]
        calls = ApplyGates(_names(trunk, tensors), self.places, gates, layers, training=trunk.training)
        return self._run_in(calls, trunk, x, tensors)

    def _run_in(self, calls: ApplyGates, trunk: nn.Module, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Run a trunk in a mode that applies gates."""
        if x.dim() != 1 + len(self._shape):
            raise ValueError(f"inputs have {1 + len(self._shape)} dimensions, as the example has, not {x.dim()}")
        with calls:
            features: Tensor = functional_call(trunk, dict(tensors), (x,)) if tensors else trunk(x)
        fewer = not trunk.training and any(calls.counts.get(name, n) != n for name, n in self._repeated.items())
        if calls.others or fewer or x.shape[1:] != self._shape:
            self._check_calls(filled(trunk, tensors) if any(p.is_meta for p in trunk.parameters()) else trunk, x, calls)
        return features

    def _check_calls(self, trunk: nn.Module, x: Tensor, calls: ApplyGates) -> None:
        """Raise if the masks may not hold for another shape, or other numbers of calls, than on the example."""
        seen = (x.shape[1:], frozenset(calls.counts.items()))
        if seen not in self._other_calls:
            sets = [None if k == ALWAYS_ACTIVE else frozenset(self.members(k) or ()) for k in range(len(self._members))]
            if not self._example.holds_for(trunk, x, sets, calls.counts):
                other = [(name, calls.counts[name]) for name, n in self._repeated.items() if calls.counts.get(name, n) != n]
                if not (found := [*calls.others, *other]):
                    raise self._other_shape(x)
                raise (only_in_training if trunk.training else not_on_example)(found[0])
            self._other_calls.add(seen)

    def _other_shape(self, x: Tensor) -> ValueError:
        """Return the error for inputs of another shape than the example, for which the masks may not hold."""
        return ValueError(
            f"inputs of shape {tuple(x.shape[1:])} use the weights of the trunk in another way than the example of shape "
            f"{tuple(self._shape)}, so that old tasks might be forgotten; give an example of the largest shape"
        )

    def _run_alike(self, trunk: nn.Module, x: Tensor, gates: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Run with the same random numbers every time, for trunks that draw them also in evaluation mode."""
        with seeded(0, "check of units, a run"):
            return self._run(trunk, x, gates, tensors)

    def weight_masks(self, values: Tensor, *, near: bool = False) -> dict[str, Tensor]:
        """Compute a mask of every parameter from one value per unit, such as the gates of a task.

        Args:
            values: (units,), from 0 (not used) to 1 (used), or bools.
            near: compute them on the device of `to`, if the tables fit there; otherwise on the CPU.

        Returns:
            By name, in the shape of the parameter: min(value of the unit that a weight writes, largest value of the units
            that it reads); the largest such minimum if several calls use the weight; 1 if it is frozen entirely. Floats, or
            bools if the values are.
        """
        total = (self._near if near else self._tables).masks(values)
        masks = {}
        for name, (start, shape, stride, offset) in self.layout.items():
            masks[name] = total.as_strided(shape, stride, start + offset)
            if name in self.frozen_entirely:
                masks[name].fill_(1)
        return masks

    def held_whole(self) -> dict[str, str]:
        """Return the trained parameters that no task after the first can change in any element, with the reason."""
        masks = self._always_used()
        trained = {name for name, p in self.trunk.named_parameters() if p.requires_grad and p.numel()}
        whole = [name for name in masks if name in self.traced & trained and bool(masks[name].all())]
        return {name: self.frozen_entirely.get(name, "not used on the example") for name in whole}

    def held_elements(self) -> dict[str, int]:
        """Return how many elements of each trained parameter no task after the first can change."""
        masks = self._always_used()
        trained = {name for name, p in self.trunk.named_parameters() if p.requires_grad}
        return {name: int(masks[name].count_nonzero()) for name in masks if name in self.traced & trained}

    def _always_used(self) -> dict[str, Tensor]:
        """Return which weights every task uses, also one whose gates are all closed: bools."""
        return {name: mask.bool() for name, mask in self.weight_masks(torch.zeros(self.count, dtype=torch.bool)).items()}

    def feature_masks(self, values: Tensor) -> Tensor:
        """Return for every feature the largest value of the units that it depends on, given one value per unit."""
        return self._tables.set_values(values)[self.features]

    def members(self, set_id: int) -> list[int] | None:
        """Return the units of a dependency set; None if it stands for "always active"."""
        return None if set_id == ALWAYS_ACTIVE else [unit for unit in self._members[set_id].tolist() if unit >= 0]

    def frozen(self) -> Tensor:
        """Return which units (units,) belong to layers whose weights do not require a gradient."""
        stopped = {name for name, p in self.trunk.named_parameters() if not p.requires_grad}
        result = torch.zeros(self.count, dtype=torch.bool)
        for name, units in self.layers.items():
            result[units] = stopped.issuperset(self.weights_of(name))
        return result

    def _find_frozen_entirely(
        self, trunk: nn.Module, untraceable: dict[str, str], on_unknown: str, leave: str
    ) -> dict[str, str]:
        """Return the parameters to freeze entirely, with the reason; raise if one of them is not allowed."""
        found = dict(untraceable)
        trained = {name for name, p in trunk.named_parameters() if p.requires_grad}
        for pattern in filter(None, (p.strip() for p in leave.split(","))):
            matching = [name for name in trained if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
            if not matching:
                raise ValueError(f"leave={pattern!r} matches no parameter of the trunk")
            found |= dict.fromkeys(matching, f"{LEFT} {pattern!r}")
        for name, operation in untraceable.items() if on_unknown == "error" else ():
            if name in trained and found[name] == operation:
                module = trunk.get_submodule(name.rpartition(".")[0])
                raise ValueError(
                    f"{name} ({type(module).__name__}) is used by {operation}, which cannot be traced to units; "
                    f"leave={name!r} freezes it entirely after the first task, on_unknown='freeze' does so for all such"
                )
        return found

    @torch.no_grad()
    def _check(self, trunk: nn.Module, x: Tensor) -> None:
        """Change all weights that random masks leave free; raise if the features change, so that no error stays hidden."""
        draw, broken = generator(0, "check of units"), False
        for share in (0.5, 0.9) * (1 if len(self._unused) > LARGE else 4):
            gates = torch.rand(self.count, generator=draw) < share
            masks = self.weight_masks(gates)
            before = self._run_alike(trunk, x, gates, {})
            changed = {n: _noisy(t, ~masks[n].bool(), draw) for n, t in trunk.named_parameters() if n in self.traced}
            broken |= not before.isfinite().all()
            if torch.equal(before, self._run_alike(trunk, x, gates, changed)) or not before.isfinite().all():
                continue
            bad = [n for n in changed if not torch.equal(before, self._run_alike(trunk, x, gates, {n: changed[n]}))]
            raise ValueError(
                f"the trunk was not traced correctly: {', '.join(bad) or 'some weights'} influence a task that should not "
                f"use them; leave={','.join(bad)!r} freezes them entirely after the first task"
            )
        if broken and self._run_alike(trunk, x, torch.ones(self.count, dtype=torch.bool), {}).isfinite().all():
            warnings.warn(
                "with some units closed the features are not finite: the trunk divides by units or takes their logarithm,"
                " as in exp(k) / exp(k).sum(); no task can be learned so; a small constant added to the divisor avoids it",
                stacklevel=4,
            )


def _names(trunk: nn.Module, tensors: Mapping[str, Tensor]) -> dict[int, str]:
    """Return the name of every parameter and buffer that a trunk is run with, by `id`."""
    return tensor_names(trunk) | {id(tensor): name for name, tensor in tensors.items()}


def last_layer(model: nn.Module, example: Tensor) -> str:
    """Find the last layer of a classifier.

    Args:
        model: a module that maps a batch of inputs to logits.
        example: one or more inputs.

    Returns:
        The name of the module whose units are the logits, in order. It raises a ValueError if there is none.
    """
    units = Units(model, example)
    outputs = [units.members(set_id) for set_id in units.features.tolist()]
    for name, own in units.layers.items():
        if outputs == [[unit] for unit in range(own.start, own.stop)] and name in dict(model.named_modules()):
            return name
    raise ValueError(
        "no layer's units are the outputs of this classifier; remove its last layer yourself and pass the rest as a trunk"
    )


def _why(tracker: DependencyTracker) -> str:
    """Return why no layer has units, if its weights are computed before they are used."""
    if not tracker.untraceable:
        return ""
    name, operation = next(iter(tracker.untraceable.items()))
    return (
        f": {name} goes through {operation} first, as in weight norm, spectral norm and weight standardisation; pmask has "
        "gates on single weights and takes such a trunk"
    )


def _noisy(parameter: Tensor, where: Tensor, draw: torch.Generator) -> Tensor:
    """Add noise to some elements. `requires_grad` and strides stay: torch chooses the kernels of some products by them."""
    noise = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
    result = torch.where(where, noise.add_(parameter.detach()), parameter.detach())
    if result.stride() != parameter.stride():
        result = parameter.detach().clone().copy_(result)
    return result.requires_grad_(parameter.requires_grad)


def _unused(uses: list[Use], total: int) -> Tensor:
    """Return 1 for elements that no layer used on the example: they are frozen, because another input might use them."""
    unused = torch.ones(total)
    for use in uses:
        if use.positions is None:
            unused[use.start : use.start + use.shape.numel()] = 0
        else:
            unused[use.positions.reshape(-1)] = 0
    return unused


def _padded(sets: list[frozenset[int] | None]) -> Tensor:
    """Return the units of every dependency set, padded with -1: (sets, size of the largest)."""
    width = max(1, *(len(s or ()) for s in sets))
    return torch.tensor([[*sorted(s or ()), *[-1] * (width - len(s or ()))] for s in sets])
