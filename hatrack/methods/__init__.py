"""Methods: one paper, one file. METHODS is written out by hand; nothing registers itself."""

from hatrack.method import Method
from hatrack.methods.frozen import Frozen
from hatrack.methods.hat import HAT
from hatrack.methods.independent import Independent
from hatrack.methods.joint import Joint
from hatrack.methods.pmask import PMASK
from hatrack.methods.random import Random

METHODS: dict[str, type[Method]] = {
    "sgd": Method,
    "frozen": Frozen,
    "independent": Independent,
    "joint": Joint,
    "random": Random,
    "hat": HAT,
    "pmask": PMASK,
}
