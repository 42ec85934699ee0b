"""Draw the dropout masks of all lanes of a stack at once, with the numbers that each run alone would draw on a GPU.

Torch draws a mask with one call, from one generator: a seed, and an offset that counts the numbers drawn so far. A kernel
here computes the same numbers (Philox with ten rounds) for the seeds and offsets of all lanes. Which number an element gets
depends on details of torch's kernel, so every mask is compared with torch's before the kernel is used (`find_masks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:  # torch has Triton where it has a GPU
    import triton
    import triton.language as tl
except ImportError:
    triton = None

aten = torch.ops.aten
BLOCK, THREADS = 512, 256  # groups of four numbers in a program here; threads in a block of torch's kernel
TRIED = (12345678987654321, 40)  # the seed and the offset with which masks are compared


@dataclass(frozen=True)
class Mask:
    """How torch draws one mask.

    Attributes:
        elements: how many elements it has.
        keep: the share of elements that are kept.
        threads: how many threads draw it.
        vector: how many neighbours one thread draws at a time.
        first: the offset of its numbers, from that of the first mask of the step.
        count: by how much it moves the offset of the generator.
    """

    elements: int
    keep: float
    threads: int
    vector: int
    first: int
    count: int


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _draw(out, seeds, offsets, first, elements, threads, keep, width: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
        lane = tl.program_id(1)
        start = tl.program_id(0) * size
        element = (start + tl.arange(0, size)) * 4  # of four neighbours, the first
        vector = element // width
        block = (vector // threads) * (width // 4) + element % width // 4
        counter = (tl.load(offsets + lane) + first) // 4 + block
        thread = (vector % threads).to(tl.uint32)
        low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
        a, b, c, d = tl.philox(tl.load(seeds + lane), low, high, thread, thread * 0)
        drawn = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        kept = drawn.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10 < keep
        place = start * 4 + tl.arange(0, size * 4)
        tl.store(out + lane.to(tl.int64) * elements + place, kept, mask=place < elements)


def draw(masks: Sequence[Mask], out: Sequence[Tensor], seeds: Tensor, offsets: Tensor) -> None:
    """Draw the masks of a step of all lanes.

    Args:
        masks: how torch draws each.
        out: the masks (lanes, ...), bools that lie in memory without gaps.
        seeds: (lanes,), of the lanes' generators.
        offsets: (lanes,), of the lanes' generators; they are moved on.
    """
    for mask, own in zip(masks, out, strict=True):
        grid = (triton.cdiv(mask.elements, 4 * BLOCK), len(own))
        arguments = own, seeds, offsets, mask.first, mask.elements, mask.threads, mask.keep
        _draw[grid](*arguments, width=mask.vector, size=BLOCK)
    offsets.add_(sum(mask.count for mask in masks))


def find_masks(draws: Sequence[Any], device: torch.device) -> list[Mask] | None:
    """Find out how torch draws the masks of a step; the generators stay as they are.

    Args:
        draws: what a run alone draws in a step (`stacked_graph.Draw`).
        device: a GPU.

    Returns:
        How each is drawn; None if they are not all masks of dropout that the kernel here draws in the same way.
    """
    if triton is None or not draws:
        return None
    found: list[Mask] = []
    with torch.random.fork_rng([device]):
        for each in draws:
            mask = _find_mask(each, device, sum(mask.count for mask in found))
            if mask is None:
                return None
            found.append(mask)
    return found


def _find_mask(each: Any, device: torch.device, first: int) -> Mask | None:
    elements = int(torch.Size(each.shape).numel())
    dense = sorted(zip(each.stride, each.shape, strict=True)) == sorted(_dense_strides(each))
    if each.operation is not aten.native_dropout.default or each.dtype is not torch.bool or elements % 4 or not dense:
        return None
    generator = torch.cuda.default_generators[device.index or 0]
    generator.manual_seed(TRIED[0])
    generator.set_offset(TRIED[1])
    wanted = each(device)
    count = generator.get_offset() - TRIED[1]
    properties = torch.cuda.get_device_properties(device)
    most = properties.multi_processor_count * (properties.max_threads_per_multi_processor // THREADS)
    threads = min(most, -(-elements // THREADS)) * THREADS
    seeds, offsets = (torch.tensor([value], device=device) for value in (TRIED[0], TRIED[1] - first))
    for vector in (4, 8, 16):
        mask = Mask(elements, 1 - each.args[0], threads, vector, first, count)
        own = torch.empty_strided((1, *each.shape), (elements, *each.stride), dtype=torch.bool, device=device)
        draw([mask], [own], seeds, offsets.clone())
        if torch.equal(own[0], wanted):
            return mask
    return None


def _dense_strides(each: Any) -> list[tuple[int, int]]:
    """Return the strides and lengths of dimensions that lie in memory without gaps, in the order of this layout."""
    found, size = [], 1
    for _, length in sorted(zip(each.stride, each.shape, strict=True)):
        found.append((size, length))
        size *= length
    return found
