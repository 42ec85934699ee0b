"""What a fit costs: floating-point operations of its steps, and memory."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torch.utils._python_dispatch import TorchDispatchMode

from hatrack.engine.interleaving import is_interleaved
from hatrack.engine.optimizers import Optimizer
from hatrack.engine.rollback import Rollback

aten = torch.ops.aten
# Fused recurrent layers do matrix products that no formula counts. A number without them would be wrong.
UNCOUNTED = frozenset({aten._cudnn_rnn, aten.mkldnn_rnn_layer, aten.miopen_rnn})


@cache
def formulas() -> dict[Any, Callable[..., int]]:
    """Return torch's formulas by operation, and those for attention on a CPU, which torch lacks."""
    from torch.utils import flop_counter  # it may import triton

    forward: Callable[..., int] = flop_counter.sdpa_flop_count
    backward: Callable[..., int] = flop_counter.sdpa_backward_flop_count

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
        return forward(q.shape, k.shape, v.shape)

    def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
        return backward(grad.shape, q.shape, k.shape, v.shape)

    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
    return {**on_cpu, **flop_counter.flop_registry}


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager that counts the floating-point operations of the block by torch's formulas.

    Torch's own `FlopCounterMode` gives every module of the process hooks, which other threads would run, too.
    """

    supports_higher_order_operators = True  # such as `flex_attention`: else torch would refuse them here

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted, self.complete, self.formulas = 0, True, formulas()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to hide the mode from torch's compiler would import the compiler, which takes seconds."""
        return False

    @property
    def total(self) -> int | None:
        """The number of operations; None if there was one that can't be counted."""
        return self.counted if self.complete else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kind = func(*args, **(kwargs or {})), getattr(func, "overloadpacket", func)
        if kind in UNCOUNTED:
            self.complete = False
        elif kind in self.formulas:
            try:
                self.counted += self.formulas[kind](*args, **(kwargs or {}), out_val=result)
            except Exception:  # a formula that fails must not end the training
                self.complete = False
        return result


def countable(module: nn.Module) -> bool:
    """Return whether counting leaves the results as they are: a part that torch compiled would run in another way."""
    parts, compiled = list(module.modules()), ("OptimizedModule", "RecursiveScriptModule", "TopLevelTracedModule")
    by_call = any(getattr(part, "_compiled_call_impl", None) is not None for part in parts)  # by `module.compile()`
    return not by_call and not any(type(part).__name__ in compiled for part in parts)


def count_real_step(step: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> int | None:
    """Do a step and return its operations."""
    count = FlopCount()
    with count:
        step(*inputs)
    return count.total


def count_trial_step(step: Callable[..., Tensor], inputs: tuple[Tensor, ...], module: nn.Module) -> int | None:
    """Return the operations of a step and roll back all that it did.

    Args:
        step: a step that obeys the rule of the step.
        inputs: its inputs.
        module: the method; its parameters get the gradients back that they had.
    """
    grads = [(p, p.grad) for p in module.parameters()]
    count = FlopCount()
    try:
        with fork_rng(), Rollback(), count, torch.enable_grad():  # type: ignore[no-untyped-call]
            step(*inputs)
    except RuntimeError:  # the step itself will tell what is wrong
        return None
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
    return count.total


def held_bytes(module: nn.Module, optimizers: list[Optimizer]) -> int:
    """Return the bytes of a method's tensors, of the gradients of what is trained, and of the optimizers' state.

    Modules in a plain list, such as the teacher of LwF, count as well.
    """
    lists = [item for value in vars(module).values() if isinstance(value, list) for item in value]
    others = [t for item in lists if isinstance(item, nn.Module) for t in (*item.parameters(), *item.buffers())]
    states = [tensor for o in optimizers for weight in o.weights for tensor in o.state[weight].values()]
    trained = [weight for optimizer in optimizers for weight in optimizer.weights]
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers(), *others, *trained, *states))


def reset_peak(device: torch.device) -> None:
    """Begin to measure the most memory that is allocated on a GPU from now on; on a CPU this does nothing."""
    if device.type == "cuda" and not is_interleaved():
        torch.cuda.reset_peak_memory_stats(device)


def measured_peak(device: torch.device) -> int | None:
    """Return the most bytes that were allocated on a GPU since `reset_peak`; None on a CPU or if several runs share it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" and not is_interleaved() else None
