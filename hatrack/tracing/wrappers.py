"""Modules around modules that hide what a trunk computes: compiled, scripted and replicated ones are refused."""

from torch import jit, nn
from torch.nn.parallel import DistributedDataParallel


def check_modules(trunk: nn.Module) -> None:
    """Raise an error in one line if a module of the trunk hides its calls or its tensors."""
    for name, module in trunk.named_modules():
        what = f"the trunk's module {name!r}" if name else "the trunk"
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            raise ValueError(
                f"{what} is compiled by torch.compile, which hides its calls: give the module before it is compiled (its "
                "._orig_mod); Trainer(engine='compiled') compiles the steps of training"
            )
        if isinstance(module, jit.ScriptModule):
            raise ValueError(f"{what} is compiled by torch.jit, which hides its calls: give the module that it was made of")
        if isinstance(module, nn.DataParallel | DistributedDataParallel):
            raise ValueError(
                f"{what} is a {type(module).__name__}, whose copies have other tensors: give its .module; a method computes "
                "on one device"
            )
