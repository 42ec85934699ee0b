"""Inputs for which a trunk makes more or fewer calls than on the example, as sequences of another length do.

The masks of the weights hold for the calls of the example. For another number of calls the trunk is traced once more, on the
input itself, with the same units. If every weight reads no more sets than on the example, the masks hold for this input too:
in a loop over time, all steps but the first one usually read the same.
"""

import copy
from collections.abc import Mapping, Set

import torch
from torch import Tensor, nn

from hatrack.seeds import seeded
from hatrack.tracing.dependencies import DependencySets
from hatrack.tracing.gates import Places, tensor_names
from hatrack.tracing.parameters import gated_parameters, ungated_weights
from hatrack.tracing.trace import Trace, Use, elements
from hatrack.tracing.tracker import DependencyTracker
from hatrack.tracing.unit_table import UnitTable


class Example:
    """What the trace of the example found out.

    Args:
        table: the units of the trunk.
        uses: which weights connect which units.
        unused: (positions,), 1 for parameter elements that are frozen because the example did not use them.
        places: the gates of all calls.
        features: (features...), the set id of every feature.
        held: the names of the parameters that need no masks: no task after the first changes them, or each has its own.
        gated: the parameters that have gates of their own, with the dimension that holds the channels.
        written: the names of the buffers that a training pass writes.
    """

    def __init__(
        self,
        table: UnitTable,
        uses: list[Use],
        unused: Tensor,
        places: Places,
        features: Tensor,
        held: set[str],
        gated: Mapping[str, int],
        written: Set[str],
    ) -> None:
        self.written = written
        self.table, self.uses, self.unused, self.places = table, uses, unused, places
        self.features, self.held, self.gated = features, held, gated

    def holds_for(self, trunk: nn.Module, x: Tensor, sets: list[frozenset[int] | None], counts: dict[str, int]) -> bool:
        """Return whether units, gates and masks hold for an input, for which the trunk is traced.

        Args:
            trunk: the trunk.
            x: a batch of inputs.
            sets: the dependency sets of the example, by their ids.
            counts: the calls that the trunk made for this input when it ran.
        """
        with seeded(0, "units of an input of another length"):
            twin, table = copy.deepcopy(trunk), copy.deepcopy(self.table)
            trace, features = trace_trunk(twin, x, self.gated, self.written, table, DependencySets(sets))
        sets_of, untraceable = trace.tracker.dependencies, set(trace.tracker.untraceable)
        if trace.counts != counts or trace.table.count != self.table.count or not untraceable <= self.held:
            return False
        ids = sets_of.reduce(trace.tracker.set_ids(features), [0])[0]
        return (
            self._same_gates(trace, features)
            and all(self._covers(use, sets_of) for use in trace.uses)
            and ids.shape == self.features.shape
            and _within(ids, self.features, sets_of)
        )

    def _same_gates(self, trace: Trace, features: Tensor) -> bool:
        """Return whether every call of a trace takes the gate that the trace found for it."""
        for key, gate in trace.final_gates(features).items():
            found = self.places.key(key, *trace.made_by[key])
            taken = None if found is None else self.places.gates[found]
            if found is None or not (taken is None if gate is None else gate.same(taken)):
                return False
        return True

    def _covers(self, use: Use, dependencies: DependencySets) -> bool:
        """Return whether the weights of a use read only sets that they also read on the example."""
        frozen = (
            self.unused[use.start : use.start + use.shape.numel()] if use.positions is None else self.unused[use.positions]
        )
        union = None
        for known in self.uses:
            if _ends(known) == _ends(use):
                union = known.reads if union is None else dependencies.union(union, known.reads)
        return bool(frozen.all()) or (union is not None and _within(use.reads, union, dependencies))


def trace_example(twin: nn.Module, x: Tensor, written: Set[str]) -> tuple[Trace, Tensor, dict[str, int]]:
    """Trace a copy of a trunk, and again as long as that shows parameters that can have gates of their own.

    Args:
        twin: the copy.
        x: a batch of inputs.
        written: the names of the buffers that a training pass writes.

    Returns:
        The last trace, the features, and the parameters with gates of their own, with the dimension that holds the channels.
    """
    parameters, gated, failed = dict(twin.named_parameters()), dict[str, int](), set[str]()
    while True:
        trace, features = trace_trunk(twin, x, gated, written)
        failed |= gated.keys() & trace.tracker.untraceable.keys()
        found = gated | gated_parameters(trace.tracker, parameters)
        found = {name: dim for name, dim in found.items() if name not in failed}
        if found == gated:
            return trace, features, gated
        gated = found


def trace_trunk(
    twin: nn.Module,
    x: Tensor,
    gated: Mapping[str, int],
    written: Set[str],
    table: UnitTable | None = None,
    dependencies: DependencySets | None = None,
) -> tuple[Trace, Tensor]:
    """Trace a copy of a trunk on two inputs, on the CPU in evaluation mode.

    Args:
        twin: the copy.
        x: a batch of inputs.
        gated: parameters that have gates of their own, with the dimension that holds the channels.
        written: the names of the buffers that a training pass writes.
        table: the units of an earlier trace.
        dependencies: the dependency sets of an earlier trace.

    Returns:
        The trace, and the features.
    """
    twin = twin.cpu().eval()
    x = x.detach()[:2].cpu() if len(x) > 1 else torch.cat([x, x]).detach().cpu()
    parameters, buffers = dict(twin.named_parameters()), dict(twin.named_buffers())
    fixed, changing = ([b for name, b in buffers.items() if (name in written) == kind] for kind in (False, True))
    tracker = DependencyTracker(parameters, x, fixed, changing, dependencies)
    trace = Trace(tensor_names(twin), tracker, table, ungated_weights(twin))
    for name, dim in gated.items():
        trace.gate_parameter(name, parameters[name], dim)
    with torch.no_grad(), tracker, trace:
        features = twin(x)
    return trace, features


def _ends(use: Use) -> object:
    """Return which parameter elements a use concerns, and which units they write."""
    return use.start, use.shape, None if use.positions is None else elements(use.positions), elements(use.writes)


def _within(ids: Tensor, larger: Tensor, dependencies: DependencySets) -> bool:
    """Return whether every set is part of a larger one."""
    larger = larger.expand_as(ids)
    return torch.equal(dependencies.union(ids, larger), larger)
