"""Names of layers that a person knows: "conv 2, 128 filters" in place of "features.3"."""

from collections import Counter

from torch import nn

KINDS: tuple[tuple[type[nn.Module], str, str, str], ...] = (  # the class, its name, the attribute of its size, its units
    (nn.Linear, "linear", "out_features", "units"),
    (nn.Bilinear, "bilinear", "out_features", "units"),
    (nn.modules.conv._ConvTransposeNd, "transposed conv", "out_channels", "filters"),
    (nn.modules.conv._ConvNd, "conv", "out_channels", "filters"),
    (nn.LSTM, "lstm", "hidden_size", "units"),
    (nn.GRU, "gru", "hidden_size", "units"),
    (nn.RNN, "rnn", "hidden_size", "units"),
    (nn.LSTMCell, "lstm cell", "hidden_size", "units"),
    (nn.GRUCell, "gru cell", "hidden_size", "units"),
    (nn.RNNCell, "rnn cell", "hidden_size", "units"),
    (nn.MultiheadAttention, "attention", "embed_dim", "channels"),
    (nn.Embedding, "embedding", "embedding_dim", "channels"),
)


def layer_titles(trunk: nn.Module) -> dict[str, str]:
    """Return a title for every layer of a trunk that has weights of a known kind, by the name of its module.

    Layers of one kind are counted from 1 in the order in which the trunk lists them.
    """
    counts: Counter[str] = Counter()
    titles = {}
    for name, module in trunk.named_modules():
        for kind, word, size, units in KINDS:
            if isinstance(module, kind):
                counts[word] += 1
                titles[name] = f"{word} {counts[word]}, {getattr(module, size)} {units}"
                break
    return titles


def title_of(parameter: str, titles: dict[str, str]) -> str:
    """Return the title of a parameter: that of its layer, or its own name if the layer has none.

    Args:
        parameter: its name, such as "features.3.weight".
        titles: what `layer_titles` returns.
    """
    layer, _, own = parameter.rpartition(".")
    if layer not in titles:  # the projections of attention are modules of their own within it
        return parameter
    return titles[layer] if own == "weight" else f"{titles[layer]}: {own}"
