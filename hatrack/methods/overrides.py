"""A check of a method's class when it is defined: what it overrides, and with which arguments."""

import inspect

PLACES = {  # what a method may change, with the arguments
    "forward": ("self", "x", "task"),
    "learn_task": ("self", "task", "fit"),
    "loss": ("self", "batch"),
    "edit_grads": ("self", "batch", "aux"),
    "constrain": ("self",),
}


def check_overrides(method: type) -> None:
    """Raise an error if a method's class overrides `learn`, or one of the five places with other arguments."""
    if "learn" in vars(method):
        raise TypeError(f"{method.__name__} overrides learn, which is the same for all methods: write learn_task instead")
    for name, arguments in PLACES.items():
        if inspect.isfunction(function := vars(method).get(name)):
            try:
                inspect.signature(function).bind(*arguments)
            except TypeError:
                raise TypeError(f"{method.__name__}.{name} must take the arguments {', '.join(arguments)}") from None
