"""Attention, positions and tables: their units and dependency sets against values worked out by hand, call by call."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hatrack import HAT, Network, Regime, Trainer
from hatrack.tracing.units import Units
from tests.helpers.learning import learn, logits
from tests.helpers.nets import Lambda, check_units, input_dependencies
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.usefixtures("_slow_path")


@pytest.fixture
def _slow_path(monkeypatch):
    """Seed the weights, and keep torch from the fused kernels outside of modes, where they would round otherwise."""
    monkeypatch.setattr("torch.backends.mha._is_fastpath_enabled", False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def rows(*shape, count=5):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


def each(first, count):
    return [{first + k} for k in range(count)]


# Fused attention


def around(attend, dim=4):
    """Return a trunk on rows of 3: a layer, attention, and a layer that reads it, called last."""
    parts = {"first": nn.Linear(3, dim), "attend": attend, "last": nn.Linear(dim, 2)}
    return Lambda(lambda own, x: own.last(own.attend(own.first(x))).mean(1), **parts)


def multihead(how, **options):
    attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
    return Lambda(how, attention=attention)


MULTIHEAD = {
    "with weights": multihead(lambda own, x: own.attention(x, x, x)[0]),
    "without": multihead(lambda own, x: own.attention(x, x, x, need_weights=False)[0]),
    "without biases": multihead(lambda own, x: own.attention(x, x, x)[0], bias=False),
    "a zero beside": multihead(lambda own, x: own.attention(x, x, x)[0], add_zero_attn=True),
    "padding": multihead(
        lambda own, x: own.attention(x, x, x, key_padding_mask=torch.arange(6).expand(len(x), 6) > 4, need_weights=False)[0]
    ),
    "causal": multihead(
        lambda own, x: own.attention(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(6), is_causal=True)[0]
    ),
}


@pytest.mark.parametrize("name", MULTIHEAD)
def test_multi_head_attention_reads_the_channels_of_its_values(name):
    """Units: first 0 to 3; queries 4 to 7, keys 8 to 11 and values 12 to 15 are packed; the output's 16 to 19."""
    units = check_units(around(MULTIHEAD[name]), rows(6, 3), on_unknown="error")
    packed, out = "attend.attention.in_proj_weight", "attend.attention.out_proj"
    assert units.layers == {
        "first": slice(0, 4), packed: slice(4, 16), out: slice(16, 20), "last": slice(20, 22),
    }  # fmt: skip
    assert input_dependencies(units, out) == each(12, 4)
    assert input_dependencies(units, "last") == each(16, 4)
    values = torch.zeros(22)
    values[[1, 9]] = 1  # unit 1 of the layer and a key
    expected = torch.zeros(12, 4)
    expected[5, 1] = 1
    assert torch.equal(units.weight_masks(values)[packed], expected)
    assert not units.held_whole()


def test_queries_of_one_sequence_and_keys_of_another():
    """The packed weights are used part by part, and each part has units of its own."""

    def forward(own, x):
        return own.last(own.attention(own.first(x[:, :2]), *[own.second(x[:, 2:])] * 2)[0]).mean(1)

    parts = {"first": nn.Linear(3, 4), "second": nn.Linear(3, 4), "last": nn.Linear(4, 2)}
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    units = check_units(Lambda(forward, **parts, attention=attention), rows(6, 3), on_unknown="error")
    queries, both = "attention.in_proj_weight[0:4]", "attention.in_proj_weight[4:12]"
    assert list(units.layers) == ["first", "second", queries, both, "attention.out_proj", "last"]
    assert input_dependencies(units, "attention.out_proj") == each(units.layers[both].start + 4, 4)
    values = torch.zeros(units.count)
    values[[0, 4, units.layers[queries].start]] = 1  # unit 0 of both layers, and the first query
    assert units.weight_masks(values)["attention.in_proj_weight"].nonzero().tolist() == [[0, 0]]


def test_keys_and_values_of_other_widths():
    def forward(own, x):
        x, y = own.first(x), own.second(x)
        return own.last(own.attention(x, y[..., :5], y[..., 5:])[0]).mean(1)

    parts = {"first": nn.Linear(3, 4), "second": nn.Linear(3, 11), "last": nn.Linear(4, 2)}
    attention = nn.MultiheadAttention(4, 2, kdim=5, vdim=6, batch_first=True)
    units = check_units(Lambda(forward, **parts, attention=attention), rows(6, 3), on_unknown="error")
    values = units.layers["attention.v_proj_weight"]
    assert input_dependencies(units, "attention.out_proj") == each(values.start, 4)


def test_learned_keys_beside_the_others():
    units = check_units(around(multihead(lambda own, x: own.attention(x, x, x)[0], add_bias_kv=True)), rows(6, 3))
    key, value = (units.layers[f"attend.attention.bias_{k}"].start for k in "kv")
    packed = units.layers["attend.attention.in_proj_weight"].start
    assert units.gates["attend.attention.bias_k", 0].units.tolist() == list(range(key, key + 4))
    assert input_dependencies(units, "attend.attention.out_proj") == [{value + k, packed + 8 + k} for k in range(4)]


def product(how):
    """Return attention of two heads with three layers and `how(q, k, v)` in the middle."""

    def forward(own, x):
        q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (own.q, own.k, own.v))
        return how(q, k, v).transpose(1, 2).flatten(2)

    return Lambda(forward, **{name: nn.Linear(4, 4) for name in "qkv"})


PRODUCTS = {
    "fused": F.scaled_dot_product_attention,
    "fused and causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "fused with a mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(6, 6).tril().bool()),
    "fused with an added mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.eye(6), scale=0.3),
    "matmul": lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(3), v),
    "bmm": lambda q, k, v: torch.bmm(
        torch.baddbmm(torch.zeros(1, 6, 6), q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)
    ).view_as(v),
    "linear attention": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "sigmoid": lambda q, k, v: torch.sigmoid(q @ k.mT) @ v,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_attention_by_any_product_keeps_the_channels_of_the_values(name):
    units = check_units(around(product(PRODUCTS[name])), rows(6, 3), on_unknown="error")
    assert input_dependencies(units, "last") == each(units.layers["attend.v"].start, 4)
    assert not units.held_whole()


@pytest.mark.parametrize("how", ["fused", "repeated", "expanded"])
def test_heads_that_share_keys_and_values(how):
    def forward(own, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (own.q, own.k, own.v))
        if how == "repeated":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        if how == "expanded":
            k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=how == "fused").transpose(1, 2).flatten(2)

    trunk = around(Lambda(forward, q=nn.Linear(8, 8), k=nn.Linear(8, 4), v=nn.Linear(8, 4)), dim=8)
    units = check_units(trunk, rows(6, 3), on_unknown="error")
    first = units.layers["attend.v"].start
    assert input_dependencies(units, "last") == [{first + c} for c in (0, 1, 0, 1, 2, 3, 2, 3)]


# Whole modules of torch

LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "batch_first": True}
MODULES = {
    "encoder": Lambda(lambda own, x: own.stack(x), stack=nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**LAYER), 2, enable_nested_tensor=False)),
    "encoder with a causal mask": Lambda(
        lambda own, x: own.stack(x, mask=nn.Transformer.generate_square_subsequent_mask(6)),
        stack=nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER, norm_first=True), 1, enable_nested_tensor=False)),
    "encoder with padding": Lambda(
        lambda own, x: own.stack(x, src_key_padding_mask=(torch.arange(6) > 4).expand(len(x), 6)),
        stack=nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 1, enable_nested_tensor=False)),
    "decoder": Lambda(lambda own, x: own.stack(x, x.flip(1)), stack=nn.TransformerDecoder(
        nn.TransformerDecoderLayer(**LAYER, activation="gelu"), 2)),
    "both": Lambda(lambda own, x: own.stack(x, x[:, :4]), stack=nn.Transformer(
        8, 2, 1, 1, 12, batch_first=True)),
    "sequence first": Lambda(lambda own, x: own.stack(x.transpose(0, 1)).transpose(0, 1), stack=nn.TransformerEncoderLayer(
        8, 2, 12)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_are_followed_whole(name):
    units = check_units(around(MODULES[name], dim=8), rows(6, 3), on_unknown="error")
    assert not units.held_whole()
    assert not units.reads, "a causal mask is the same for every input"


def test_gates_reach_the_fused_kernels_of_evaluation(monkeypatch):
    """Without a mode, torch takes kernels that get the parameters themselves; within `run` it must not."""
    monkeypatch.setattr("torch.backends.mha._is_fastpath_enabled", True)
    layer = nn.TransformerEncoderLayer(**LAYER, dropout=0).eval()
    trunk = nn.Sequential(nn.Linear(3, 8), layer, nn.Flatten(), nn.Linear(48, 2)).eval()
    units = Units(trunk, rows(6, 3))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(units.run(rows(6, 3), torch.ones(units.count)), trunk(rows(6, 3)))
            closed = torch.ones(units.count, dtype=torch.bool)
            closed[units.layers["1.norm2"]] = False
            assert torch.equal(units.run(rows(6, 3), closed), trunk[3].bias.expand(5, 2))


# Positions, tokens, tables


def test_a_class_token_and_positions_have_a_gate_per_channel():
    """Units: the token's 0 to 3, positions' 4 to 7, the layer's 8 to 11; the norm reads sums and has its own, 12 to 15."""

    def forward(own, x):
        x = torch.cat([own.token.expand(len(x), -1, -1), own.first(x)], 1) + own.places
        return own.last(own.norm(x).mean(1))

    tables = {"token": nn.Parameter(torch.randn(1, 1, 4)), "places": nn.Parameter(torch.randn(1, 7, 4))}
    trunk = Lambda(forward, **tables, first=nn.Linear(3, 4), norm=nn.LayerNorm(4), last=nn.Linear(4, 2))
    units = check_units(trunk, rows(6, 3), on_unknown="error")
    assert list(units.layers.values()) == [slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16), slice(16, 18)]
    assert list(units.layers) == ["token", "places", "first", "norm", "last"]
    assert input_dependencies(units, "last") == each(12, 4)
    values = torch.zeros(18)
    values[[1, 6]] = 1
    masks = units.weight_masks(values)
    assert masks["token"].flatten().tolist() == [0, 1, 0, 0]
    assert masks["places"].sum((0, 1)).tolist() == [0, 0, 7, 0]
    gates = torch.ones(18)
    gates[1] = 0
    gates[6] = 0.5
    x = torch.cat([(trunk.token * gates[:4]).expand(5, -1, -1), trunk.first(rows(6, 3))], 1) + trunk.places * gates[4:8]
    torch.testing.assert_close(units.run(rows(6, 3), gates), trunk.last(trunk.norm(x).mean(1)))


def test_positions_of_an_image_have_their_channels_where_the_image_has():
    parts = {"first": nn.Conv2d(1, 4, 1), "places": nn.Parameter(torch.randn(1, 4, 6, 6)), "last": nn.Linear(4, 2)}
    trunk = Lambda(lambda own, x: own.last((own.first(x) + own.places).relu().mean((2, 3))), **parts)
    units = check_units(trunk, rows(1, 6, 6), on_unknown="error")
    assert units.gates["places", 0].dim == 1
    assert input_dependencies(units, "last") == [{k, 4 + k} for k in range(4)]


def test_biases_for_distances_have_a_gate_per_head():
    """The table has a row per distance; what is added to the logits has the heads first."""
    place = torch.arange(6)[:, None] - torch.arange(6) + 5

    def forward(own, x):
        q, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (own.q, own.v))
        logits = q @ q.mT + own.table[place].permute(2, 0, 1)
        return own.last((logits.softmax(-1) @ v).transpose(1, 2).flatten(2)).mean(1)

    parts = {"q": nn.Linear(3, 4), "v": nn.Linear(3, 4), "last": nn.Linear(4, 2)}
    units = check_units(Lambda(forward, **parts, table=nn.Parameter(torch.randn(11, 2))), rows(6, 3), on_unknown="error")
    assert units.layers["table"] == slice(0, 2)
    assert units.gates["table", 0].dim == 1
    assert input_dependencies(units, "last") == each(6, 4)


@pytest.mark.parametrize("how", ["module", "function", "index", "bag"])
def test_tables_that_are_looked_up_by_token(how):
    ids = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(0))
    table = nn.EmbeddingBag(7, 4) if how == "bag" else nn.Embedding(7, 4)

    def forward(own, x):
        if how == "function":
            x = F.embedding(x, own.table.weight)
        else:
            x = own.table.weight[x] if how == "index" else own.table(x)
        return own.last(x.relu() if how == "bag" else x.relu().mean(1))

    units = check_units(Lambda(forward, table=table, last=nn.Linear(4, 2)), ids, on_unknown="error")
    assert input_dependencies(units, "last") == each(0, 4)
    values = torch.zeros(6)
    values[2] = 1
    assert units.weight_masks(values)["table.weight"].sum(0).tolist() == [0, 0, 7, 0], "every row, even of unseen tokens"


def test_a_table_that_a_lookup_rescales_is_held_whole():
    trunk = Lambda(lambda own, x: own.last(own.table(x).mean(1)), table=nn.Embedding(7, 4, max_norm=1), last=nn.Linear(4, 2))
    units = Units(trunk, torch.randint(0, 7, (2, 6), generator=torch.Generator().manual_seed(0)))
    assert set(units.frozen_entirely) == {"table.weight"}


def test_layers_with_the_weights_of_a_product_first():
    """(inputs, outputs) with a bias, as `addmm` takes them."""
    parts = {"first": nn.Linear(3, 4), "w": nn.Parameter(torch.randn(4, 5)), "b": nn.Parameter(torch.randn(5))}
    trunk = Lambda(lambda own, x: torch.addmm(own.b, own.first(x).relu(), own.w), **parts)
    units = check_units(trunk, rows(3), on_unknown="error")
    values = torch.rand(9)
    masks = units.weight_masks(values)
    torch.testing.assert_close(masks["w"], torch.minimum(values[:4, None], values[None, 4:]))
    torch.testing.assert_close(masks["b"], values[4:])


# Scales


SCALES = {
    "of channels": lambda own, x: x * own.scale,
    "of heads": lambda own, x: (x.unflatten(-1, (4, 2)) * own.scale[:4, None]).flatten(2),
    "as a temperature": lambda own, x: x / own.scale[:1].exp(),
    "of a norm written out": lambda own, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * own.scale,
    "a slope": lambda own, x: F.prelu(x.mT, own.scale).mT,
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_are_kept_per_task(name):
    scale = Lambda(SCALES[name], scale=nn.Parameter(torch.rand(8) + 0.5))
    parts = {"first": nn.Linear(4, 8), "scale": scale, "last": nn.Linear(8, 8)}
    trunk = Lambda(lambda own, x: own.last(own.scale(own.first(x.flatten(1, 2))).tanh()).mean(1), **parts)
    units = check_units(trunk, rows(1, 4, 4), on_unknown="error")
    assert units.per_task == {"scale.scale"}
    assert input_dependencies(units, "last") == each(0, 8), "a scale changes no dependency"
    tasks = toy_tasks(3)
    hat = HAT(Network(trunk, tasks=tasks))
    fit, before = Trainer(Regime(epochs=3, batch=8, optimizer="adamw", lr=0.02, weight_decay=0.1)), []
    for task in tasks:
        learn(hat, [task], fit)
        before.append(logits(hat, task))
    assert all(torch.equal(logits(hat, task), then) for task, then in zip(tasks, before, strict=True))
    assert len({tuple(hat.norms.of(task)["scale.scale"].tolist()) for task in (1, 2)}) == 2
    assert not hat.held


def test_positions_by_rotation_join_pairs_of_channels():
    def forward(own, x):
        x = own.first(x)
        angle = torch.arange(6)[:, None] / 10 ** torch.arange(2)
        turned = torch.cat([-x[..., 2:], x[..., :2]], -1) * angle.sin().repeat(1, 2)
        return own.last(x * angle.cos().repeat(1, 2) + turned).mean(1)

    units = check_units(Lambda(forward, first=nn.Linear(3, 4), last=nn.Linear(4, 2)), rows(6, 3), on_unknown="error")
    assert input_dependencies(units, "last") == [{0, 2}, {1, 3}, {0, 2}, {1, 3}]


def test_blocks_left_out_at_random_move_no_gate_of_packed_weights():
    """The parts of packed weights are found by their place, whatever was called before them."""

    class Skipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.skip = nn.Linear(4, 8), False
            self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))

        def forward(self, x):
            x = self.embed(x)
            for k, block in enumerate(self.blocks):
                if not (self.skip and k == 1):
                    x = x + block(x, x.detach(), x.detach())[0]
            return x.mean(1)

    trunk = Skipped().eval()
    units = Units(trunk, rows(4, 4))
    gates = torch.ones(units.count)
    gates[units.layers["blocks.1.out_proj"]] = 0
    closed = units.run(rows(4, 4), gates)
    trunk.skip = True
    torch.testing.assert_close(units.run(rows(4, 4), torch.ones(units.count)), closed)
    assert closed.isfinite().all()
