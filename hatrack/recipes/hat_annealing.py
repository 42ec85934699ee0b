"""Figure 2 of HAT (001): what annealing and its compensation do to the gradients of the embeddings. It needs no run."""

import torch
from torch import Tensor

from hatrack.experiments.metrics import Matrix
from hatrack.methods.parts.annealing import LIMIT, compensation
from hatrack.recipes.plots import curves
from hatrack.recipes.recipe import Grid, Part
from hatrack.recipes.results import Results

LEAST = 0.01  # of its largest value: where a curve is higher, an embedding learns


def annealing_gradients(smax: float = 400.0, batches: int = 1000) -> dict[str, tuple[Matrix, Matrix]]:
    """Return the gradient that an embedding gathers per batch in an epoch, against its value.

    The gradient of a gate a = sigmoid(s e) by its embedding is s a (1 - a). Annealing lets s grow from 1 / smax to smax in
    an epoch; the compensation multiplies with what turns the gradient of an annealed gate into that of a plain sigmoid.
    """
    e = torch.linspace(-LIMIT, LIMIT, 4801, dtype=torch.float64)
    growing = torch.linspace(1 / smax, smax, batches, dtype=torch.float64)

    def gathered(hardness: Tensor, compensated: bool = False) -> tuple[Matrix, Matrix]:
        total = torch.zeros_like(e)
        for s in hardness:
            slope = (
                s * torch.sigmoid(s * e) * torch.sigmoid(-s * e)
            )  # of the gate, without a difference of nearly equal numbers
            total += slope * (compensation(e, s, smax) if compensated else 1)
        return e.numpy(), (total / len(hardness)).numpy()

    return {
        "s = 1, no annealing": gathered(torch.ones(1, dtype=torch.float64)),
        f"s = {smax:g}": gathered(torch.full((1,), smax, dtype=torch.float64)),
        "annealed": gathered(growing),
        "annealed and compensated": gathered(growing, True),
    }


def ranges(results: Results) -> Grid:
    """Return the largest gradient of every curve, and up to which embedding it is at least a hundredth of that."""
    rows = []
    for label, (e, gradient) in annealing_gradients().items():
        reached = float(abs(e[gradient >= LEAST * gradient.max()]).max())
        rows.append([label, f"{gradient.max():.3g}", f"{reached:.2f}" + (" (all)" if reached == LIMIT else "")])
    title = "Magnitude, and range: the largest |e| whose gradient is at least a hundredth of the largest"
    return Grid(title, ["", "largest gradient", "range"], rows)


ANNEALING = Part(
    "annealing",
    "Figure 2: annealing and the gradients of the embeddings",
    "What an embedding gathers of gradient in an epoch, per batch, against its value. As the paper says, with s = smax the "
    "gradient is much larger than with s = 1, in a much lower range, and the annealed one lies between. (The paper's "
    "figure has |e| < 1 for s = smax, which fits an smax near 10; the default is 400.) The compensation gives the "
    "magnitude of smax, and would give the range of s = 1, but for its cut-off where s |e| is over 50 (as in the paper), "
    "which leaves a narrower bell with long tails. The curves are exact; in float32, in which networks are trained, a gate "
    "is exactly 1 from s e = 17 on, which cuts off more on the right.",
    plots=(curves("gradients", "Figure 2: what annealing does to the gradients", annealing_gradients, "embedding e"),),
    grids=(ranges,),
)
