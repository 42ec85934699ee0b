"""Which units feed which weights, in any module: found by running it once on an example, so that nobody lists layers.

Units are the outputs of linear and convolutional layers, numbered through; a norm that acts on a sum of several units has
units of its own. Every unit has a place where a gate can close it: behind its layer, or behind the batch norms that alone
read it. `labels.py` tells for every input of a layer which units feed it, so unit masks give weight masks. Parameters that
can't be followed (attention, recurrent cells, computed weights) are held whole, or refused by name.
"""

import copy
import fnmatch
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from hatrack.seeds import generator, seeded
from hatrack.tracing.dependencies import ALWAYS, Shadows
from hatrack.tracing.trace import LAYERS, Gates, Trace, Use, names_of

LARGE = 10**6  # weights: of a network with more, the rules are checked with fewer masks


class Units:
    """The units of a trunk, the weights between them, and the trunk's forward pass with a gate on every unit."""

    def __init__(
        self, trunk: nn.Module, example: Tensor, *, on_unknown: Literal["freeze", "error"] = "freeze", leave: str = ""
    ) -> None:
        self.trunk = trunk
        twin = copy.deepcopy(trunk).cpu().eval()
        x = example[:2].cpu() if len(example) > 1 else torch.cat([example, example]).cpu()
        _no_recomputation(copy.deepcopy(twin), x)
        shadows = Shadows(dict(twin.named_parameters()))
        trace = Trace(names_of(twin), shadows)
        with torch.no_grad(), shadows, trace:
            features = twin(x)
        self.count, self.layers, self.gates = trace.count, trace.layers, trace.placed(features)
        if not self.count:
            raise ValueError("the trunk has no linear or convolutional layer whose units could be gated")
        self.features = shadows.labels.reduce(shadows.of(features), [0])[0]  # the label of every feature
        self._uses = trace.uses
        self._unused = _unused(trace.uses, shadows.total)
        self._places = {n: (shadows.first[n], p.shape, p.stride(), p.storage_offset()) for n, p in twin.named_parameters()}
        self._members = _members(shadows.labels.sets)
        self.followed = set(self._places) - trace.norms  # the parameters that masks may leave free
        self.whole = self._whole(twin, shadows.unknown, on_unknown, leave)  # parameters that are held whole
        self._check(twin, x)

    def to(self, device: torch.device) -> None:
        self.gates = {key: gate and gate._replace(units=gate.units.to(device)) for key, gate in self.gates.items()}

    def run(self, x: Tensor, gates: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """The features of a batch with a gate (units,) on every unit, and some tensors of the trunk exchanged.

        Gates of type bool select, so that not even an infinity passes a closed one; others multiply.
        """
        return self._run(self.trunk, x, gates, tensors or {})

    def _run(self, trunk: nn.Module, x: Tensor, gates: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        names = names_of(trunk) | {id(tensor): name for name, tensor in tensors.items()}
        with Gates(names, self.gates, gates):
            return functional_call(trunk, dict(tensors), (x,)) if tensors else trunk(x)  # type: ignore[no-any-return]

    def on(self, values: Tensor) -> Tensor:
        """The largest value of the units of every label (labels,), given one value per unit."""
        padded = torch.cat([values, values.new_zeros(1)])[self._members].amax(1)
        padded[ALWAYS] = 1
        return padded

    def frozen(self) -> Tensor:
        """Which units (units,) are those of layers whose weights can't be trained."""
        stopped = {name for name, p in self.trunk.named_parameters() if not p.requires_grad}
        result = torch.zeros(self.count, dtype=torch.bool)
        for name, units in self.layers.items():
            result[units] = f"{name}.weight" in stopped
        return result

    def members(self, label: int) -> list[int] | None:
        """The units of a label; None: always on."""
        return None if label == ALWAYS else [unit for unit in self._members[label].tolist() if unit >= 0]

    def spread(self, values: Tensor) -> dict[str, Tensor]:
        """For every weight, the smaller value of the unit that it writes and the largest of those that it reads."""
        values = values.detach().float().cpu()
        on, total = self.on(values), self._unused.clone()
        for use in self._uses:
            least = torch.minimum(values[use.writes], on[use.reads]).expand(use.shape).reshape(-1)
            if use.positions is None:
                part = total[use.start : use.start + len(least)]
                torch.maximum(part, least, out=part)
            else:
                total.scatter_reduce_(0, use.positions.reshape(-1), least, "amax")
        found = {}
        for name, (start, shape, stride, offset) in self._places.items():
            found[name] = total.as_strided(shape, stride, start + offset)
            if name in self.whole:
                found[name].fill_(1)
        return found

    def _whole(self, trunk: nn.Module, unknown: dict[str, str], on_unknown: str, leave: str) -> dict[str, str]:
        """The parameters to hold whole, with the reason."""
        found = dict(unknown)
        trained = {name for name, p in trunk.named_parameters() if p.requires_grad}
        for pattern in filter(None, (p.strip() for p in leave.split(","))):
            matching = [name for name in trained if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
            if not matching:
                raise ValueError(f"leave={pattern!r} matches no parameter of the trunk")
            found |= dict.fromkeys(matching, f"left out by {pattern!r}")
        for name, operation in unknown.items() if on_unknown == "error" else ():
            if name in trained and found[name] == operation:
                module = trunk.get_submodule(name.rpartition(".")[0])
                raise ValueError(
                    f"{name} ({type(module).__name__}) goes into {operation}, where units can't be followed; leave={name!r} "
                    "holds it whole after the first task, on_unknown='freeze' all such"
                )
        return found

    @torch.no_grad()
    def _check(self, trunk: nn.Module, x: Tensor) -> None:
        """A hole in the rules is found here, not after training: move all that random masks leave free, and compare."""
        draw = generator(0, "check of units")
        for share in (0.5, 0.9) * (1 if len(self._unused) > LARGE else 4):
            gates = torch.rand(self.count, generator=draw) < share
            held = self.spread(gates)
            before = self._run(trunk, x, gates, {})
            moved = {n: _noisy(t, held[n] == 0, draw) for n, t in trunk.named_parameters() if n in self.followed}
            if torch.equal(before, self._run(trunk, x, gates, moved)) or not before.isfinite().all():
                continue
            bad = [name for name in moved if not torch.equal(before, self._run(trunk, x, gates, {name: moved[name]}))]
            raise ValueError(
                f"the units of this trunk were not followed rightly: {', '.join(bad) or 'some weights'} matter to a task "
                f"that does not use them; leave={','.join(bad)!r} holds them whole after the first task"
            )


def last_layer(model: nn.Module, example: Tensor) -> str:
    """The name of the module whose units are the outputs of a classifier, in order."""
    units = Units(model, example)
    firsts = [units.members(label) for label in units.features.tolist()]
    for name, numbers in units.layers.items():
        if firsts == [[unit] for unit in range(numbers.start, numbers.stop)] and name in dict(model.named_modules()):
            return name
    raise ValueError("no layer's units are the outputs of this classifier; cut it by hand and give the rest as a trunk")


def _noisy(parameter: Tensor, where: Tensor, draw: torch.Generator) -> Tensor:
    """With noise on some elements. It wants a gradient as before, by which torch chooses the kernels of some products."""
    noise = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
    return torch.where(where, parameter + noise, parameter).requires_grad_(parameter.requires_grad)


def _unused(uses: list[Use], total: int) -> Tensor:
    """1 for the elements of parameters that no layer used on the example: another input might, so they are always held."""
    unused = torch.ones(total)
    for use in uses:
        if use.positions is None:
            unused[use.start : use.start + use.shape.numel()] = 0
        else:
            unused[use.positions.reshape(-1)] = 0
    return unused


def _members(sets: list[frozenset[int] | None]) -> Tensor:
    """The units of every label, filled up with -1 (labels, most)."""
    width = max(1, *(len(s or ()) for s in sets))
    return torch.tensor([[*sorted(s or ()), *[-1] * (width - len(s or ()))] for s in sets])


class _NoLayers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LAYERS:
            raise ValueError(
                "the trunk computes layers a second time on the way back (gradient checkpointing): not followed"
            )
        return func(*args, **(kwargs or {}))


def _no_recomputation(trunk: nn.Module, x: Tensor) -> None:
    """Gates would be missing in what is computed again on the way back."""
    with seeded(0, "units"), torch.enable_grad():
        out = trunk.train()(x)
        if not isinstance(out, Tensor):
            raise ValueError(f"in training mode the trunk must give a tensor of features, not {type(out).__name__}")
        if out.requires_grad:
            edge = torch.autograd.graph.get_gradient_edge(out)  # a mode is off in what it handles, and of a tensor it would
            with _NoLayers():  # handle the whole way back
                torch.autograd.backward(edge, torch.ones_like(out))
