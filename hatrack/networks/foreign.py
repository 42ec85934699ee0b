"""Trunks of other libraries, named `timm:MODEL` and `transformers:NAME_OR_FOLDER`, where these libraries are installed.

Only the architecture is taken from there, with initial weights; nothing is downloaded. A file with weights is read by
`weights.py`.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn import functional as F

from hatrack.options import Option, check

ImageSize = Annotated[int, Option("height and width to which images are resized; 0: as they are", low=0, high=10000)]
Builder = Callable[..., nn.Module]


class ForeignTrunk(nn.Module):
    """A model of another library as a trunk: from images or token ids to a feature vector.

    Args:
        model: the model.
        image_size: height and width to which images are resized; 0: they stay as they are.
    """

    def __init__(self, model: nn.Module, image_size: int) -> None:
        super().__init__()
        self.model, self.image_size = model, image_size

    def forward(self, x: Tensor) -> Tensor:
        if self.image_size and x.is_floating_point():
            x = F.interpolate(x, size=(self.image_size, self.image_size), mode="bilinear")
        return features_of(self.model(x))

    def renamed(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of a file under the names that they have in the model.

        The files of transformers may have other names than the model. The library knows them if its model can be built from
        a table of tensors; otherwise, or if the tensors are those of another model, they are returned as they are.
        """
        build = getattr(type(self.model), "from_pretrained", None)
        if build is None:
            return tensors
        try:
            made, told = build(None, config=self.model.config, state_dict=dict(tensors), output_loading_info=True)
        except Exception:  # what does not fit is said by the caller
            return tensors
        state: dict[str, Tensor] = made.state_dict()
        missing = {*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])}
        return {name: t for name, t in state.items() if name not in missing}


def features_of(out: Any) -> Tensor:
    """Return (batch, features) from what a model returns: a tensor, or a table with its pooled output or hidden states."""
    found: Tensor = out
    if not isinstance(out, Tensor):
        pooled = getattr(out, "pooler_output", None)
        found = out.last_hidden_state if pooled is None else pooled
    if found.dim() == 3:  # (batch, patches or tokens, channels)
        return found.mean(1)
    return found.flatten(2).mean(2) if found.dim() > 3 else found  # (batch, channels, height, width)


def timm_network(model: str) -> Builder:
    """Return the function that builds a model of timm, such as "vit_tiny_patch16_224", without its classifier."""

    def build(shape: tuple[int, ...], *, image_size: ImageSize = 0) -> nn.Module:
        """A model of timm without its classifier, with initial weights."""
        check(build, {"image_size": image_size})
        if not re.fullmatch(r"[\w.-]+", model):  # "hf-hub:..." would be downloaded
            raise ValueError(f"timm:{model} is no name of a model of timm, such as timm:vit_tiny_patch16_224")
        library = _library("timm")
        made = _made("timm", model, lambda: library.create_model(model, pretrained=False, num_classes=0, in_chans=shape[0]))
        return ForeignTrunk(made, image_size)

    return _named(build, "timm", model)


def transformers_network(model: str) -> Builder:
    """Return the function that builds a model of transformers by the name of a configuration that is on this machine, or by
    the folder of its config.json."""

    def build(shape: tuple[int, ...], *, image_size: ImageSize = 0) -> nn.Module:
        """A model of transformers without a head, with initial weights; its features are a mean over the positions."""
        check(build, {"image_size": image_size})
        library = _library("transformers")

        def make() -> nn.Module:
            config = library.AutoConfig.from_pretrained(model, local_files_only=True)
            try:  # a pooling layer would hold weights that many files with weights lack
                made: nn.Module = library.AutoModel.from_config(config, add_pooling_layer=False)
            except TypeError:
                made = library.AutoModel.from_config(config)
            return made

        return ForeignTrunk(_made("transformers", model, make), image_size)

    return _named(build, "transformers", model)


def _named(build: Builder, library: str, model: str) -> Builder:
    """Give a function the place by which `Registry.name_of` names it."""
    build.__module__, build.__qualname__ = library, model
    return build


def _library(name: str) -> Any:
    """Import a library, or raise a ValueError in one line."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library that is broken may raise anything
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"the library {name} can't be imported ({said}): pip install {name}") from None


def _made(library: str, model: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model, or raise a ValueError with what the library says in one line."""
    try:
        return make()
    except Exception as error:  # each library has its own errors
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"network {library}:{model} can't be built: {type(error).__name__}: {said}") from None
