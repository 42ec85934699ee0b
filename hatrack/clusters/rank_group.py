"""The processes of a run on several ranks: they sum gradients in a fixed order, stop together, and have the same bits."""

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from hatrack.text import shorten
from hatrack.training.checkpoint import stopping

LIMIT = timedelta(minutes=30)  # a rank that saves, or evaluates longer than others, is waited for so long
NORMS = (nn.modules.batchnorm._BatchNorm,)
asked_to_stop = threading.Event()  # on this rank; all ranks stop after the same step


class RankGroup:
    """The processes that torchrun started for a run. They speak by gloo on CPUs, by NCCL on GPUs.

    Every rank computes the gradients of its part of a batch. The parts are gathered and added up in the order of the ranks,
    on every rank alike, so that all ranks take the same step, bit for bit, and it does not depend on the network.
    """

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def sum_parts(self, parameters: Sequence[nn.Parameter], loss: Tensor | None) -> Tensor:
        """Sum the gradients of all parts in the order of the ranks: see `Ranks`."""
        device = parameters[0].device
        head = torch.tensor([loss is not None, asked_to_stop.is_set()], dtype=torch.float64, device=device)
        head = torch.cat([head, torch.tensor([p.grad is not None for p in parameters], dtype=torch.float64, device=device)])
        heads = self._gather(head)
        present = [bool(one[0]) for one in heads]
        if any(bool(one[1]) for one in heads):
            stopping.set()  # at the same step on all ranks
        for kind in sorted({p.dtype for p in parameters}, key=str):
            self._sum([(k, p) for k, p in enumerate(parameters) if p.dtype == kind], heads)
        value = torch.zeros((), device=device) if loss is None else loss
        losses = self._gather(value.reshape(1))
        return torch.stack([one[0] for one, there in zip(losses, present, strict=True) if there]).sum()

    def _sum(self, numbered: list[tuple[int, nn.Parameter]], heads: list[Tensor]) -> None:
        """Sum the gradients of parameters of one type. Those that no rank has stay without."""
        wanted = [(k, p) for k, p in numbered if any(bool(head[2 + k]) for head in heads)]
        if not wanted:
            return
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for _, p in wanted])
        parts, start = self._gather(flat), 0
        for k, parameter in wanted:
            end, total = start + parameter.numel(), None
            for head, part in zip(heads, parts, strict=True):
                if head[2 + k]:
                    total = part[start:end].clone() if total is None else total.add_(part[start:end])
            assert total is not None
            parameter.grad, start = total.reshape(parameter.shape), end

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(found, tensor.contiguous())
        return found

    def total(self, number: int) -> int:
        """Return the sum of a number over the ranks."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, number)
        return sum(found)

    def check_method(self, method: nn.Module) -> None:
        """Raise a ValueError if the network has a batch norm, whose statistics would be those of a part of a batch."""
        for name, module in method.named_modules():
            if isinstance(module, NORMS):
                raise ValueError(
                    f"--ranks {self.size} is not for a network with batch norm ({name}): every rank would have statistics "
                    "of its own part of a batch, and the ranks would differ"
                )

    def check_same(self, method: nn.Module) -> None:
        """Raise a RuntimeError if the state of a method is not the same on every rank, bit for bit."""
        digest = hashlib.sha256()
        for name, value in method.state_dict().items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.check_equal("weights", digest.hexdigest())

    def check_equal(self, what: str, value: Any) -> None:
        """Raise a RuntimeError if a value, such as what was measured, is not the same on every rank."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, repr(value))
        if len(set(found)) > 1:
            said = "; ".join(f"rank {rank}: {shorten(one, 80)}" for rank, one in enumerate(found))
            raise RuntimeError(f"the ranks have different {what}: {said}")


@contextmanager
def joined(device: str) -> Iterator[RankGroup]:
    """Within it this process is a rank of the group that torchrun started."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=LIMIT)
    try:
        yield RankGroup()
    finally:
        distributed.destroy_process_group()
