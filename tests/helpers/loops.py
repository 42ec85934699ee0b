"""The Fisher diagonal as a plain loop over examples."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hatrack import Method
from hatrack.tasks.split import Split


def loop(method: Method, split: Split, task: int, parameters: list[nn.Parameter], estimator: str = "samples") -> Tensor:
    """The Fisher diagonal by its definition, one example after the other."""
    method.eval()
    totals = [torch.zeros_like(p) for p in parameters]
    for j in range(len(split)):
        logits = method(split.inputs(torch.tensor([j])), task)
        shares = F.softmax(logits.detach(), 1)[0] if estimator == "expected" else F.one_hot(split.y[j], logits.shape[1])
        for label, share in enumerate(shares.tolist()):
            loss = F.cross_entropy(logits, torch.tensor([label]))
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            for total, gradient in zip(totals, gradients, strict=True):
                total += 0 if gradient is None else share * gradient**2
    return torch.cat([t.reshape(-1) for t in totals]) / len(split)
