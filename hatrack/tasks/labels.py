"""Labels and other targets from arrays: checked, brought into one form, with the target that they belong to."""

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from hatrack.options import nearest, shown, whole
from hatrack.tasks.arrays import as_tensor, check_labels
from hatrack.tasks.statistics import balanced, spread
from hatrack.tasks.targets import CLASSES, Compare, Kind, MultiLabel, Ordinal, Own, Regression, Target

TRIED = 64  # examples whose targets are not finite, and as many others, with which a loss is tried


class Labelled(NamedTuple):
    """What a network is asked for.

    Attributes:
        target: how outputs are compared with it.
        outputs: how many outputs a head has.
        train: the targets of the training examples.
        test: those of the test examples.
    """

    target: Target
    outputs: int
    train: Tensor
    test: Tensor


def labelled(
    what: str,
    train: Any,
    test: Any,
    *,
    kind: Kind,
    classes: int | None,
    class_weights: Any,
    loss: Compare | None,
    score: Compare | None,
) -> Labelled:
    """Check the targets of a task and find out what they are.

    Args:
        what: names the task in errors.
        train: the targets of the training examples, an array or a tensor.
        test: those of the test examples.
        kind: what they are; of no effect if there is a loss.
        classes: how many classes, grades or outputs there are; None: by the training targets.
        class_weights: "balanced", or a number per class; None: all count the same.
        loss: a loss of the user's own.
        score: a score of the user's own.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"{what}: no target {shown(kind)}; {nearest(str(kind), get_args(Kind))}")
    if class_weights is not None and (kind != "classes" or loss is not None):
        raise ValueError(f"{what}: class_weights are for targets that are classes")
    if loss is not None:
        return _own(what, train, test, classes, loss, score)
    if score is not None:
        raise ValueError(f"{what}: a score of your own needs a loss of your own beside it")
    if kind in ("classes", "ordinal"):
        whole_numbers = _whole_numbers(f"{what}, training", train), _whole_numbers(f"{what}, test", test)
        return _classes(what, *whole_numbers, kind, classes, class_weights)
    given, other = _numbers(f"{what}, training", train), _numbers(f"{what}, test", test)
    if given.shape[1:] != other.shape[1:]:
        raise ValueError(
            f"{what}: training targets have shape {tuple(given.shape[1:])}, test targets {tuple(other.shape[1:])}"
        )
    if classes not in (None, given[:1].numel()):
        raise ValueError(f"{what}: {given[:1].numel()} numbers per example, but classes={classes}")
    if kind == "multi-label":
        return _multi_label(what, given, other)
    rows, others = given.reshape(len(given), -1), other.reshape(len(other), -1)
    mean, std = spread(rows)
    if not (mean.isfinite() & std.isfinite()).all():
        raise ValueError(
            f"{what}: targets up to {rows.abs().max().item():g} are too large for their variance to be computed"
        )
    target = Regression(mean=mean, std=std, flat=given.dim() == 1)
    return Labelled(target, rows.shape[1], rows.to(mean.dtype), others.to(mean.dtype))


def _classes(what: str, train: Tensor, test: Tensor, kind: str, classes: int | None, weights: Any) -> Labelled:
    classes = int(train.max()) + 1 if classes is None else whole(f"{what}: classes", classes)
    check_labels(f"{what}, training", train, classes, every=True)
    check_labels(f"{what}, test", test, classes, every=False)
    if kind == "ordinal":
        if classes < 2:
            raise ValueError(f"{what}: grades need at least two values, not {classes}")
        return Labelled(Ordinal(), classes - 1, train, test)
    target = CLASSES if weights is None else Target(weights=_weights(what, train, classes, weights))
    return Labelled(target, classes, train, test)


def _weights(what: str, y: Tensor, classes: int, weights: Any) -> Tensor:
    """Return the weights of classes, with a mean of 1 over the training examples."""
    if isinstance(weights, str):
        if weights != "balanced":
            raise ValueError(f"{what}: class_weights must be 'balanced' or a number per class, not {shown(weights)}")
        return balanced(y, classes)
    found = as_tensor(f"{what}: class_weights must be numbers", weights).float()
    if found.shape != (classes,) or not found.isfinite().all() or (found < 0).any() or not found[y].sum() > 0:
        raise ValueError(f"{what}: class_weights must be {classes} numbers from 0, one per class, not {shown(weights)}")
    return found / found[y].mean()


def _multi_label(what: str, train: Tensor, test: Tensor) -> Labelled:
    for y in (train, test):
        if y.dim() != 2 or not ((y == 0) | (y == 1)).all():
            raise ValueError(f"{what}: targets of several labels are 0 or 1, of shape (n, labels), not {shown(y)[:80]}")
    return Labelled(MultiLabel(), train.shape[1], train.float(), test.float())


def _own(what: str, train: Any, test: Any, outputs: int | None, loss: Compare, score: Compare | None) -> Labelled:
    for name, function in (("loss", loss), ("score", score)):
        if function is not None and not callable(function):
            raise ValueError(f"{what}: {name} must be a function of outputs and targets, not {shown(function)}")
    if outputs is None:
        raise ValueError(f"{what}: a task with a loss of its own needs classes=N, the number of outputs of its head")
    parts = [as_tensor(f"{what}: targets must be numbers", y) for y in (train, test)]
    parts = [y.float() if y.dtype == torch.float64 else y for y in parts]
    outputs = whole(f"{what}: classes", outputs)
    for part, y in zip(("training", "test"), parts, strict=True):
        _check_loss(f"{what}, {part}", loss, y, outputs)
    return Labelled(Own(own_loss=loss, own_score=score), outputs, *parts)


def _check_loss(what: str, loss: Compare, y: Tensor, outputs: int) -> None:
    """Raise an error if some targets are not finite and neither the loss nor its gradient leaves them out, as both may."""
    finite = y.isfinite().reshape(len(y), -1).all(1)
    if finite.all():
        return
    tried = y[torch.cat([part.nonzero()[:TRIED, 0] for part in (~finite, finite)])]
    given = torch.zeros(len(tried), outputs, device=y.device, requires_grad=True)
    try:
        found = loss(given, tried).sum()
        (gradient,) = torch.autograd.grad(found, given)
    except Exception:  # it may need what is not there yet; training will tell
        return
    if not (found.isfinite() & gradient.isfinite().all()):
        raise ValueError(
            f"{what}: NaN or infinite targets in {int((~finite).sum())} examples, for which the loss or its gradient is not "
            "finite; leave them out before the loss is computed, as in out[~y.isnan()]"
        )


def _whole_numbers(what: str, given: Any) -> Tensor:
    """Return labels (n,) as int64; raise an error unless they are whole numbers."""
    y = as_tensor(f"{what}: labels must be whole numbers", given)
    if y.dim() != 1:
        raise ValueError(f"{what}: {len(y)} images, but labels of shape {tuple(y.shape)}; one label per image is needed")
    if y.is_complex():
        raise ValueError(f"{what}: labels must be whole numbers, not {y.dtype}")
    if y.is_floating_point() and not (found := y.isfinite() & (y == y.round())).all():
        raise ValueError(f"{what}: labels must be whole numbers, not {y[~found][0].item()}")
    return y.long()


def _numbers(what: str, given: Any) -> Tensor:
    """Return targets (n,) or (n, numbers); raise an error unless they are finite."""
    y = as_tensor(f"{what}: targets must be numbers", given)
    if y.dim() not in (1, 2) or y.is_complex() or not y[:1].numel():
        raise ValueError(f"{what}: targets must be real numbers of shape (n,) or (n, numbers), not {tuple(y.shape)}")
    if not y.isfinite().all():
        raise ValueError(
            f"{what}: NaN or infinite targets in {int((~y.isfinite()).reshape(len(y), -1).any(1).sum())} examples"
        )
    return y
