"""A stack: the steps of several runs as one step, with a lane for each run.

The tensors that a run's step uses are moved to its lane when its fit begins: the same objects then are views of the stack's
memory. So all other code of a run, such as evaluations and checkpoints, works on its lane and need not know of the stack.
The examples of an epoch are listed ahead, so that a step needs nothing from Python: each lane has its place in its epoch.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hatrack.engine import philox
from hatrack.engine.recorded import WARM_UP
from hatrack.engine.stacked_form import Form
from hatrack.engine.stacked_graph import lane_tensor

ROOM = 1024  # batches of an epoch for which there is room at first


class Member:
    """A fit in a lane of a stack.

    Attributes:
        stack: the stack.
        lane: the number of the lane.
        tensors: those that the step uses besides its inputs; they lie in the lane.
        images: the stored images from which the examples are taken.
        pending: how many steps are to be done.
        done: how many were done since the lane was handed over.
        offset: of the run's generator on the GPU when the lane was handed over.
        cpu, gpu: the states of the run's generators while it waits for its steps.
    """

    def __init__(self, stack: "Stack", lane: int, tensors: Sequence[Tensor], images: Tensor) -> None:
        self.stack, self.lane, self.tensors, self.images = stack, lane, tensors, images
        self.pending = self.done = self.offset = 0
        self.cpu, self.gpu = torch.get_rng_state(), stack.generators[lane] if stack.generators else None


class Stack:
    """The steps of several runs of one form.

    Args:
        form: the form of the step.
        inputs: the inputs of a step of one run: images, what else is fetched of its examples, and the number of the batch.
        tensors: the other tensors that a step of one run uses.
        record: whether steps are recorded as a CUDA graph.
    """

    def __init__(self, form: Form, inputs: Sequence[Tensor], tensors: Sequence[Tensor], *, record: bool) -> None:
        self.form, self.record, self.device = form, record, inputs[0].device
        self.members: dict[int, Member] = {}
        gpu = self.device.type == "cuda"
        # Torch has 32 streams of each priority and hands them out in turn. What is recorded must not be the stream of a run.
        self.stream = torch.cuda.Stream(self.device, priority=-1) if gpu else None  # type: ignore[no-untyped-call]
        with self.on_stream():
            self.inputs, self.tensors = ([lane_tensor(t, form.lanes).zero_() for t in ts] for ts in (inputs, tensors))
            self.draws = [lane_tensor(draw.blank(self.device), form.lanes).zero_() for draw in form.draws]
            self.casts = [torch.empty_like(self.tensors[place], dtype=dtype).zero_() for place, dtype in form.casts]
            self.place = torch.zeros(form.lanes, dtype=torch.int64, device=self.device)
            self.lanes = torch.arange(form.lanes, device=self.device)
            self.lists = self._room(ROOM)
            self.masks = philox.find_masks(form.draws, self.device) if gpu else None  # to be drawn for all lanes at once
            self.seeds, self.offsets = torch.zeros_like(self.lanes), torch.zeros_like(self.lanes)
        self.generators = [torch.Generator(self.device) for _ in range(form.lanes if gpu else 0)]
        self.graph: Any = None
        self.error: Exception | None = None  # of a step: what it left in the lanes is the state of no run
        self.warm = 0  # how many steps were done since something changed that a recording holds
        self.draws_recorded = gpu  # whether a recording holds the draws as well

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Within it, work for a GPU goes to the stream of the stack."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def _room(self, batches: int) -> list[Tensor]:
        """Return lists of the epochs of all lanes (lanes, batches, ...): rows of images, then the inputs but the images and
        the number of the batch, as they are stored."""
        rows = torch.zeros(self.form.lanes, batches, self.inputs[0].shape[1], dtype=torch.int64, device=self.device)
        others = [torch.zeros(len(t), batches, *t.shape[1:], dtype=t.dtype, device=t.device) for t in self.inputs[1:-1]]
        return [rows, *others]

    # Members

    @property
    def has_place(self) -> bool:
        """Whether another run can join."""
        return len(self.members) < self.form.lanes and self.error is None

    @torch.no_grad()
    def join(self, tensors: Sequence[Tensor], images: Tensor, fills: Mapping[int, float] | None = None) -> Member:
        """Move the tensors of a run's step to a free lane.

        Args:
            tensors: the tensors.
            images: the stored images from which the examples are taken.
            fills: for tensors with fewer rows than the lane has, by `id`, the value of the other rows.
        """
        lane = min(set(range(self.form.lanes)) - self.members.keys())
        self.wait_for_stack()
        shared = self._shared(tensors)
        for own, tensor in zip(self.tensors, tensors, strict=True):
            place = own[lane]
            if place.shape != tensor.shape:
                place.fill_((fills or {})[id(tensor)])
                place = place[: len(tensor)]
            place.copy_(tensor)
            if id(tensor) not in shared:
                tensor.data = place
        moved = [tensor for tensor in tensors if id(tensor) not in shared]
        self.members[lane] = Member(self, lane, moved, images)
        self._forget_recording()
        return self.members[lane]

    def _shared(self, tensors: Sequence[Tensor]) -> set[int]:
        """Return the identities of tensors that the step of another run uses as well, such as the mean of the images. Nobody
        changes them, so that they need not be in the lane.

        Raises:
            RuntimeError: if a tensor is a part of another one: it could not be moved to the lane.
        """
        others = {id(tensor) for member in self.members.values() for tensor in member.tensors}
        shared = {
            id(tensor)
            for tensor, written in zip(tensors, self.form.written, strict=True)
            if id(tensor) in others and not written
        }
        own = [tensor for tensor in tensors if id(tensor) not in shared and tensor.numel()]
        whole = all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in own)
        if not whole or len({tensor.untyped_storage().data_ptr() for tensor in own}) < len(own):
            raise RuntimeError("tensors of the step share their memory")
        return shared

    @torch.no_grad()
    def leave(self, member: Member) -> None:
        """Give the tensors of a run's step memory of their own."""
        self.wait_for_stack()
        for tensor in member.tensors:
            tensor.data = tensor.detach().clone()
        for own in self.lists:  # the lane goes on without a run: it must ask for no image that the other runs do not have
            own[member.lane].zero_()
        if self.stream is not None:  # and it must not change before it was copied
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        del self.members[member.lane]
        self._forget_recording()

    def list_epoch(self, member: Member, parts: Sequence[Tensor], first: int) -> None:
        """Note the examples of an epoch: rows of the images, and the others parts of the batches, (batches, size, ...) each;
        the epoch goes on from the batch `first`."""
        self.wait_for_stack()
        batches = len(parts[0])
        if batches > self.lists[0].shape[1]:
            larger = self._room(2 ** batches.bit_length())
            for new, old in zip(larger, self.lists, strict=True):
                new[:, : old.shape[1]] = old
            self.lists = larger
            self._forget_recording()
        for own, part in zip(self.lists, parts, strict=True):
            own[member.lane, :batches] = part
        self.place[member.lane] = first

    # Streams and generators

    def wait_for_stack(self) -> None:
        """Let later work of a run wait until the stack has done its steps."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    @torch.no_grad()
    def enter(self, member: Member) -> None:
        """Hand the lane over to the stack, with the state of the run's generators, until `exit`."""
        member.cpu, member.done = torch.get_rng_state(), 0
        self.wait_for_stack()
        for copy, (place, _) in zip(self.casts, self.form.casts, strict=True):
            copy[member.lane].copy_(self.tensors[place][member.lane])
        if self.stream is None or member.gpu is None:
            return
        if self.masks is None:
            member.gpu.set_state(torch.cuda.get_rng_state(self.device))
        else:
            own = self._generator
            seed, member.offset = own.initial_seed(), own.get_offset()
            self.seeds[member.lane] = seed - 2**64 if seed >= 2**63 else seed  # its 64 bits
            self.offsets[member.lane] = member.offset
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    @property
    def _generator(self) -> torch.Generator:
        """The generator on the GPU of the run that executes this."""
        found: torch.Generator = torch.cuda.default_generators[self.device.index or 0]
        return found

    def exit(self, member: Member) -> None:
        """Take the lane back."""
        self.wait_for_stack()
        torch.set_rng_state(member.cpu)
        if self.masks is not None:
            self._generator.set_offset(member.offset + member.done * sum(mask.count for mask in self.masks))
        elif member.gpu is not None:
            torch.cuda.set_rng_state(member.gpu.get_state(), self.device)

    # Steps

    @torch.no_grad()
    def drive(self) -> None:
        """Do as many steps as all members wait for. An error of a step is one of all members: it is noted for them."""
        waiting = [member for member in self.members.values() if member.pending]
        if not waiting or self.error is not None:
            return
        count = min(member.pending for member in waiting)
        try:
            with self.on_stream(), torch.autocast(self.device.type, enabled=False):
                for _ in range(count):
                    self._step_or_replay()
        except Exception as error:
            self.error = error
            return
        for member in waiting:
            member.pending -= count
            member.done += count

    def _step_or_replay(self) -> None:
        if self.graph is None and self.record and self.warm >= WARM_UP:
            self._record()
        if self.graph is None:
            self._fetch()
            self._draw()
            self._compute()
            self.warm += 1
            return
        if not self.draws_recorded:
            self._draw()
        self.graph.replay()

    def _fetch(self) -> None:
        """Take the next batch of every lane."""
        rows, *others = (own[self.lanes, self.place] for own in self.lists)
        images, *inputs, number = self.inputs
        stores = {id(member.images): member.images for member in self.members.values()}
        if len(stores) == 1:
            images.copy_(next(iter(stores.values())).index_select(0, rows.flatten()).view_as(images))
        else:
            for member in self.members.values():
                own = images[member.lane].view(-1, *member.images.shape[1:])
                torch.index_select(member.images, 0, rows[member.lane], out=own)
        for own, part in zip(inputs, others, strict=True):
            own.copy_(part)
        number.copy_(self.place)
        self.place.add_(1).clamp_(max=self.lists[0].shape[1] - 1)  # lanes without a run go on too

    def _draw(self) -> None:
        """Draw the random numbers of every lane from its own generator."""
        if not self.form.draws:
            return
        if self.masks is not None:
            philox.draw(self.masks, self.draws, self.seeds, self.offsets)
            return
        outside, default = torch.get_rng_state(), None
        if self.stream is not None:
            default = self._generator
            before = default.graphsafe_get_state()
        for member in self.members.values():
            torch.set_rng_state(member.cpu)
            if default is not None and member.gpu is not None:
                default.graphsafe_set_state(member.gpu)
            for own, draw in zip(self.draws, self.form.draws, strict=True):
                own[member.lane].copy_(draw(self.device))
            member.cpu = torch.get_rng_state()
        torch.set_rng_state(outside)
        if default is not None:
            default.graphsafe_set_state(before)

    def _compute(self) -> None:
        self.form.code(*self.inputs, *self.draws, *self.tensors, *self.casts)

    # Recording

    def _forget_recording(self) -> None:
        """Record anew, after a few steps: what a recording holds has changed."""
        self.graph, self.warm = None, 0

    def _record(self) -> None:
        """Record a step without executing it; if the draws can't be recorded, without them."""
        if self.draws_recorded:
            self.graph = self._recording(draws=True)
            self.draws_recorded = self.graph is not None
        if self.graph is None:
            self.graph = self._recording(draws=False)
        self.record = self.graph is not None

    def _recording(self, *, draws: bool) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            for generator in self.generators if draws and self.masks is None else []:
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self._fetch()
                if draws:
                    self._draw()
                self._compute()
        except RuntimeError as error:
            what = "random numbers of stacked steps" if draws else "stacked steps"
            warnings.warn(f"{what} are not recorded: {str(error).splitlines()[0]}", stacklevel=2)
            return None
        return graph
