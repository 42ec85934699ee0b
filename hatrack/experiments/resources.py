"""What a run used: bytes that are kept, memory, steps, floating-point operations, and energy where the device tells it."""

from collections.abc import Iterable
from contextlib import suppress

import torch

from hatrack.engine.interleaving import is_interleaved
from hatrack.experiments.record_parts import Costs
from hatrack.methods.fit import FitResult
from hatrack.methods.method import Method


class EnergyMeter:
    """Measures the energy of a GPU from now on. It needs the package pynvml (`nvidia-ml-py`), and no other run beside it.

    Args:
        device: the device of the run.
        before: the joules of the earlier part of a run that is continued; None if they are not known.
    """

    def __init__(self, device: torch.device, before: float | None = 0.0) -> None:
        self.before, self.device = before, device
        self.start = None if before is None or is_interleaved() else device_energy(device)

    def joules(self) -> float | None:
        """Return the energy so far; None if the device does not tell it."""
        now = None if self.start is None else device_energy(self.device)
        return None if now is None or self.start is None or self.before is None else self.before + now - self.start


def device_energy(device: torch.device) -> float | None:
    """Return the joules that a GPU has taken since its driver was loaded; None if it does not tell."""
    if device.type != "cuda":
        return None
    with suppress(Exception):  # no package, no driver, or a GPU without a meter
        import pynvml as nvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000  # from millijoules
    return None


def costs_of(method: Method, fits: Iterable[FitResult], joules: float | None) -> Costs:
    """Return what a run used.

    Args:
        method: the method at the end of the run.
        fits: the results of all fits.
        joules: the energy.
    """
    fits = list(fits)
    totals = {name: _total([getattr(fit, name) for fit in fits]) for name in ("steps", "examples", "flops")}
    peaks = [fit.peak_bytes for fit in fits if fit.peak_bytes is not None]
    return Costs(method.kept_bytes(), max(peaks, default=None), **totals, joules=joules)


def _total(values: list[int | None]) -> int | None:
    """Return the sum of the values; None if one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
