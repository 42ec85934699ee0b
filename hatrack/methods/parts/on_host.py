"""Read a small table of the method in Python without waiting for the GPU: it is read again only when it has changed.

A forward pass that reads from the GPU waits for all that was issued before, and can't be recorded.
"""

from typing import Any

from torch import Tensor


class OnHost:
    """The values of a tensor as lists.

    Example:
        >>> read = OnHost()
        >>> read(torch.tensor([1, 2]))
        [1, 2]
    """

    def __init__(self) -> None:
        self.read: tuple[Tensor | None, int, Any] = (None, -1, [])  # the tensor, its version and its values: one for all

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that was read last."""
        return self.read[0]

    def __call__(self, tensor: Tensor) -> Any:
        """Return `tensor.tolist()`, from the device only if this is another tensor or was written since the last call."""
        if tensor.is_inference():  # torch does not count the writes to it
            return tensor.tolist()
        known, version, values = self.read  # read and written at once, because several threads may call
        if tensor is not known or tensor._version != version:
            version, values = tensor._version, tensor.tolist()
            self.read = (tensor, version, values)
        return values

    def __reduce__(self) -> tuple[type["OnHost"], tuple[()]]:
        return OnHost, ()  # a copy belongs to another tensor
