"""Methods: one paper, one file. METHODS is written out by hand; nothing registers itself."""

from hatrack.methods.agem import AGEM
from hatrack.methods.den import DEN
from hatrack.methods.er import ER
from hatrack.methods.ewc import EWC
from hatrack.methods.frozen import Frozen
from hatrack.methods.hat import HAT
from hatrack.methods.imm_mean import IMMMean
from hatrack.methods.imm_mode import IMMMode
from hatrack.methods.independent import Independent
from hatrack.methods.joint import Joint
from hatrack.methods.lfl import LFL
from hatrack.methods.lwf import LwF
from hatrack.methods.mas import MAS
from hatrack.methods.method import Method
from hatrack.methods.packnet import PackNet
from hatrack.methods.pathnet import PathNet
from hatrack.methods.pmask import PMASK
from hatrack.methods.pnn import PNN
from hatrack.methods.random import Random
from hatrack.methods.si import SI
from hatrack.methods.stable_sgd import StableSGD

METHODS: dict[str, type[Method]] = {
    "sgd": Method,
    "frozen": Frozen,
    "independent": Independent,
    "joint": Joint,
    "random": Random,
    "hat": HAT,
    "pmask": PMASK,
    "ewc": EWC,
    "imm-mean": IMMMean,
    "imm-mode": IMMMode,
    "si": SI,
    "mas": MAS,
    "lwf": LwF,
    "lfl": LFL,
    "agem": AGEM,
    "er": ER,
    "stable-sgd": StableSGD,
    "packnet": PackNet,
    "den": DEN,
    "pathnet": PathNet,
    "pnn": PNN,
}
