"""Growing: finished tasks keep their bits on networks of many kinds, through later tasks, files, kills and failures."""

import copy

import pytest
import torch
from torch import nn

from hatrack import METHODS, Method, Network, Regime, Run, Trainer, compare_certificates, load, run, save
from hatrack.files import tensors
from hatrack.seeds import seeded
from tests.helpers.growing import SHAPE, TRUNKS, WrittenOut, convolutions
from tests.helpers.killing import OFTEN, assert_same, killed_at, to_the_end
from tests.helpers.learning import OPTIMIZERS, FunctionFit
from tests.helpers.tiers import quick_and_slow
from tests.helpers.toys import toy_tasks

pytestmark = pytest.mark.filterwarnings("ignore:task .* finds under .* free", "ignore:with some units closed")
SIZES = (1, 3, 64)  # images in a batch; the network's example has others
IMAGES = {size: torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(size)) for size in SIZES}
both = pytest.mark.parametrize("name", ["hat", "pmask"])


def build(trunk: str):
    with seeded(0, "trunk"):
        return TRUNKS[trunk]()


def make(name, tasks, trunk="mlp", **options):
    return METHODS[name](Network(build(trunk) if isinstance(trunk, str) else trunk, tasks=tasks), **options)


def trainer(**options):
    return Trainer(Regime(**{"epochs": 1, "batch": 16, "lr": 0.1, **options}))


@torch.no_grad()
def answers(method, task):
    method.eval()
    return {size: method(images, task) for size, images in IMAGES.items()}


def assert_answers(method, before):
    for task, then in before.items():
        for size, now in answers(method, task).items():
            assert torch.equal(now, then[size]), (task, size)


CASES = [(name, trunk) for trunk in TRUNKS for name in ("hat", "pmask")]
QUICK = [("hat", "mlp"), ("pmask", "mlp"), ("hat", "convolutions"), ("pmask", "branches"), ("hat", "branches"),
         ("hat", "packed attention"), ("pmask", "halves"), ("hat", "lstm"), ("hat", "norms")]  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(CASES, QUICK))
def test_finished_tasks_keep_their_bits(case, tmp_path):
    """Through two growths, the tasks after them, and a file that is loaded with the trunk as it was first."""
    (name, trunk), tasks, before = case, toy_tasks(4, shape=SHAPE), {}
    method, fit = make(name, tasks, trunk), trainer(optimizer="adam", lr=0.02, weight_decay=0.01, keep_state=True)
    for task in tasks:
        method.learn(task, fit)
        assert_answers(method, before)
        before[task.index], certificate = answers(method, task.index), method.certificate()
        if task.index in (0, 2):
            grown = method.grow(0.5)
            assert grown
            assert all(new > old for old, new in grown.values())
            assert_answers(method, before)
            assert compare_certificates(method.certificate(), certificate).same == list(method.history.values())
    save(method, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", build(trunk))
    assert_answers(again, before)
    assert compare_certificates(again.certificate(), method.certificate()).kept
    for task in tasks:
        served, cut = method.for_task(task.index), method.extract(task.index)
        torch.testing.assert_close(served(IMAGES[3]), before[task.index][3], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cut(IMAGES[3]), before[task.index][3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("optimizer", quick_and_slow(OPTIMIZERS, ["kept momentum"]))
@both
def test_no_optimizer_moves_a_finished_task(name, optimizer):
    tasks, before = toy_tasks(4, shape=SHAPE), {}
    method, fit = make(name, tasks), trainer(epochs=3, **OPTIMIZERS[optimizer])
    for task in tasks:
        method.learn(task, fit)
        assert_answers(method, before)
        before[task.index] = answers(method, task.index)
        method.grow({"2": 3})


@pytest.mark.parametrize("trunk", ["mlp", "convolutions", "resnet18", "branches", "packed attention", "gru", "lstm", "loop"])
def test_old_units_compute_the_same_within_the_wider_trunk(trunk):
    """Weights and units lie in the right places: with all new units closed, the wide trunk computes what the narrow one
    did, up to rounding."""
    tasks, module = toy_tasks(2, shape=SHAPE), build(trunk)
    if trunk == "branches":
        # New channels between old ones, as of a concatenation, change groups of several channels.
        module.norm, module.up = nn.Identity(), nn.ConvTranspose2d(20, 8, 2, stride=2)
    method = make("hat", tasks, module)
    gates = torch.rand(method.units.count, generator=torch.Generator().manual_seed(1)) < 0.7
    narrow, norms = method.units, [*method.norms.names]
    method.eval()
    with torch.no_grad():
        before = narrow.run(IMAGES[3], gates)
        method.grow(0.5)
        generation = method.growth.generations[0]
        wide = torch.zeros(method.units.count, dtype=torch.bool)
        wide[generation.places.units] = gates
        after = method.units.run(IMAGES[3], wide)
    old = torch.stack([f for f in after.T if f.any()]) if before.any() else after.T
    expected = torch.stack([f for f in before.T if f.any()])
    assert method.norms.names == norms
    torch.testing.assert_close(old, expected, atol=1e-5, rtol=1e-4)


def test_places_of_flattened_filters_by_hand():
    """2 filters of 2x2 pixels are flattened to 8 inputs; after growth to 3 filters, to 12. The old ones come first."""
    trunk = nn.Sequential(nn.Conv2d(1, 2, 7), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    kernel, weight, bias = (p.detach().clone() for p in (trunk[0].weight, trunk[3].weight, trunk[3].bias))
    method = make("hat", toy_tasks(1, shape=SHAPE), trunk)
    assert method.grow({"0": 1, "3": 0.25}) == {"0": (2, 3), "3": (4, 5)}
    wide = method.net.trunk
    assert wide[0].weight.shape == (3, 1, 7, 7)
    assert wide[3].weight.shape == (5, 12)
    assert (wide[0].out_channels, wide[3].in_features, wide[3].out_features, method.net.features) == (3, 12, 5, 5)
    assert torch.equal(wide[0].weight[:2], kernel)
    assert torch.equal(wide[3].weight[:4, :8], weight)
    assert torch.equal(wide[3].bias[:4], bias)
    fresh = torch.cat([wide[3].weight[4], wide[3].weight[:4, 8:].flatten()])
    assert 0 < fresh.abs().max() <= 12**-0.5
    assert trunk[3].weight.shape == (4, 8), "the trunk that was given is left alone"


@both
def test_layers_that_are_added_grow_together(name):
    method = make(name, toy_tasks(1, shape=SHAPE), "resnet18")
    grown = method.grow({"0.0": 2} if name == "hat" else {"0.0.weight": 2})
    assert set(grown) == {"0.0", "1.0.conv2", "1.1.conv2"}
    assert set(grown.values()) == {(2, 4)}


def test_heads_and_groups_keep_their_sizes():
    method = make("hat", toy_tasks(1, shape=SHAPE), "packed attention")
    method.grow(0.5)
    assert (method.net.trunk.heads, method.net.trunk.packed.out_features) == (6, 72)
    method = make("hat", toy_tasks(1, shape=SHAPE), "branches")
    method.grow(0.5)
    trunk = method.net.trunk
    assert trunk.norm.num_channels // trunk.norm.num_groups == 5
    assert trunk.depthwise.groups == trunk.norm.num_channels
    assert trunk.up.in_channels // trunk.up.groups == 5
    method = make("hat", toy_tasks(1, shape=SHAPE), "encoder")
    method.grow(0.5)
    attention = method.net.trunk.layer.self_attn
    assert (attention.num_heads, attention.head_dim, attention.embed_dim) == (6, 4, 24)


def changed(method, state):
    """The tensors of a method that differ from an earlier state, and those that only one of both has."""
    now = method.state_dict()
    return [key for key in {*now, *state} if key not in now or key not in state or not torch.equal(now[key], state[key])]


@both
def test_a_width_that_is_written_out_is_refused_with_its_line(name):
    tasks = toy_tasks(2, shape=SHAPE)
    with pytest.raises(ValueError, match=r"growing\.py, line \d+: x = x\.view\(-1, 1024\)"):
        make(name, tasks, WrittenOut(), grow="auto")
    method = make(name, tasks, WrittenOut())
    method.learn(tasks[0], trainer())
    before, state = {0: answers(method, 0)}, {key: value.clone() for key, value in method.state_dict().items()}
    with pytest.raises(ValueError, match=r"view\(-1, 1024\)") as error:
        method.grow(0.5)
    assert "\n" not in str(error.value)
    assert changed(method, state) == []
    assert_answers(method, before)
    method.learn(tasks[1], trainer())
    assert_answers(method, before)


def test_what_cannot_grow_says_so():
    tasks = toy_tasks(2, shape=SHAPE)
    with pytest.raises(ValueError, match="Method can't grow; hat and pmask can"):
        Method(Network(build("mlp"), tasks=tasks)).grow()
    with pytest.raises(ValueError, match="masks='soft'"):
        make("hat", tasks, masks="soft").grow()
    with pytest.raises(ValueError, match="norms='shared'"):
        make("hat", tasks, "norms", norms="shared").grow()
    with pytest.raises(ValueError, match="heads='shared'"):
        METHODS["pmask"](Network(build("mlp"), tasks=tasks, heads="shared")).grow()
    frozen = METHODS["hat"](Network(build("mlp"), tasks=tasks, freeze="2"))
    with pytest.raises(ValueError, match="no layer can grow: 2"):
        frozen.grow({"2": 1})
    assert frozen.grow(1.0) == {"5": (7, 14)}


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (0, "must be a share above 0"), (-0.5, "-0.5"), (float("nan"), "nan"), ("much", "'much'"), (True, "True"),
        (1000.0, "1000"), ({"2": 0}, "from 1 to"), ({"2": -1}, "-1"), ({"7": 1}, "no layer '7'.*there are: 2, 5"),
        ({"2": 1.5j}, "1.5j"),
    ],
)  # fmt: skip
def test_wrong_amounts_are_refused(by, words):
    method = make("hat", toy_tasks(1, shape=SHAPE))
    with pytest.raises(ValueError, match=words):
        method.grow(by)


@both
def test_a_task_that_fails_after_growth_leaves_the_old_network(name):
    tasks = toy_tasks(3, shape=SHAPE)
    method = make(name, tasks, "norms", grow="auto", grow_below=1.0)
    method.learn(tasks[0], trainer())
    before, certificate = {0: answers(method, 0)}, method.certificate()
    state = {key: value.clone() for key, value in method.state_dict().items()}
    widths = []

    def fail(method, task, **changes):
        widths.append(method.net.features)
        with torch.no_grad():
            for p in method.parameters():
                p.add_(1)
        raise RuntimeError("the power failed")

    with pytest.raises(RuntimeError, match="the power failed"):
        method.learn(tasks[1], FunctionFit(fail))
    assert widths == [12], "it had grown"
    assert changed(method, state) == []
    assert method.net.features == 8
    assert_answers(method, before)
    method.learn(tasks[1], trainer())
    assert method.net.features == 12
    assert_answers(method, before)
    assert compare_certificates(method.certificate(), certificate).kept


@both
def test_tasks_that_are_released_or_learned_again_have_the_present_width(name):
    tasks = toy_tasks(4, shape=SHAPE)
    method, fit = make(name, tasks, "norms"), trainer()
    for task in tasks[:3]:
        method.learn(task, fit)
    method.grow(1.0)
    before = {0: answers(method, 0)}
    method.learn(tasks[3], fit)
    method.learn(tasks[1], fit)
    method.release(2)
    assert [method.net.heads[k].in_features for k in range(4)] == [8, 16, 16, 16]
    assert_answers(method, before)
    before[1] = answers(method, 1)
    method.learn(tasks[2], fit)
    assert_answers(method, before)
    method.learn(tasks[0], fit)
    assert method.net.heads[0].in_features == 16
    assert method.growth.born == {}
    del before[0]
    assert_answers(method, before)


def fail_to_learn(method, task, **changes):
    raise RuntimeError("no")


@both
def test_a_task_that_could_not_be_learned_again_is_what_it_was(name):
    tasks = toy_tasks(2, shape=SHAPE)
    method = make(name, tasks, "norms")
    for task in tasks:
        method.learn(task, trainer())
    before = {k: answers(method, k) for k in range(2)}
    method.grow(0.5)
    for task in tasks:
        with pytest.raises(RuntimeError, match="no"):
            method.learn(task, FunctionFit(fail_to_learn))
    assert_answers(method, before)


@both
def test_tasks_that_are_added_after_growth(name, tmp_path):
    tasks = toy_tasks(3, shape=SHAPE)
    method, before = make(name, tasks[:1], "norms"), {}
    for task in tasks:
        if task.index:
            assert method.net.add_task(task.classes) == task.index
        method.learn(task, trainer())
        before[task.index] = answers(method, task.index)
        method.grow(0.3)
        assert_answers(method, before)
        save(method, tmp_path / "model")
        method = load(tmp_path / "model", build("norms"))
        assert_answers(method, before)
    assert len(method.growth.steps) == 3


@both
def test_growing_by_itself(name):
    tasks = toy_tasks(4, shape=SHAPE)
    method = make(name, tasks, grow="auto", grow_below=0.6, grow_by=1.0, c=0.1)
    before, widths = {}, []
    for task in tasks:
        room = [1 - share for share in method.usage().values()]
        method.learn(task, trainer(epochs=4))
        widths.append((method.net.trunk[2].out_features, min(room)))
        assert_answers(method, before)
        before[task.index] = answers(method, task.index)
    sizes = [10, *(width for width, _ in widths)]
    for k, (width, room) in enumerate(widths):
        assert width == sizes[k] if room >= 0.6 else width >= sizes[k]
    assert sizes[-1] > 10


def test_growth_says_how_much():
    tasks = toy_tasks(2, shape=SHAPE)
    method = make("hat", tasks, grow="auto", grow_below=1.0)
    method.learn(tasks[0], trainer())
    with pytest.warns(UserWarning, match=r"task 'toy 1' finds under 100% free in 2, 5; widened: 2 from 10 to 15 units"):
        method.learn(tasks[1], trainer())


def test_files_of_methods_that_never_grew_have_nothing_new(tmp_path):
    tasks = toy_tasks(1, shape=SHAPE)
    for name in ("hat", "pmask"):
        method = make(name, tasks)
        method.learn(tasks[0], trainer())
        save(method, tmp_path / "model")
        values, metadata = tensors.load(tmp_path / "model")
        assert not [key for key in values if "growth" in key]
        assert not [key for key in metadata["options"] if "grow" in key]


@pytest.mark.parametrize("steps", [[[10**9, 7]], [[9, 7]], [[15]], [[15, 11, 3]], [[15, 12]], [[-15, 11]]])
def test_damaged_steps_are_refused(steps):
    tasks = toy_tasks(1, shape=SHAPE)
    method = make("hat", tasks)
    method.grow(0.5)
    state = {**method.state_dict(), "growth.steps": torch.tensor(steps)}
    with pytest.raises(RuntimeError):
        make("hat", tasks).load_state_dict(state)


@pytest.mark.parametrize("born", [[[0, 5]], [[4, 0]], [[-1, 0]], [[0, 0, 0]], [[0.0, 0.0]]])
def test_damaged_generations_are_refused(born):
    tasks = toy_tasks(1, shape=SHAPE)
    method = make("hat", tasks)
    method.grow(0.5)
    with pytest.raises(RuntimeError):
        make("hat", tasks).load_state_dict({**method.state_dict(), "growth.born": torch.tensor(born)})


@both
def test_copies_and_other_lengths(name):
    """A copy of a grown method, and images of another length than the example, for which the narrow trunk is traced."""
    tasks = toy_tasks(2, shape=SHAPE)
    method = make(name, tasks, "lstm")
    method.learn(tasks[0], trainer())
    longer = torch.randn(2, 1, 11, 8)
    before, other = {0: answers(method, 0)}, method(longer, 0)
    method.grow(0.5)
    assert torch.equal(method(longer, 0), other)
    method.learn(tasks[1], trainer())
    copied = copy.deepcopy(method)
    assert_answers(copied, before)
    assert torch.equal(copied(longer, 0), other)


@both
def test_a_pass_in_training_mode_leaves_the_statistics(name):
    tasks = toy_tasks(2, shape=SHAPE)
    method = make(name, tasks, "norms")
    for task in tasks:
        method.learn(task, trainer())
    before = {k: answers(method, k) for k in range(2)}
    method.grow(0.5)
    method.train()
    for task in range(2):
        assert method(IMAGES[64], task).requires_grad
    assert_answers(method, before)


@both
def test_routes_after_growth(name):
    tasks = toy_tasks(3, shape=SHAPE, noise=0.1)
    method, fit = make(name, tasks, "convolutions"), trainer(epochs=3)
    for task in tasks[:2]:
        method.learn(task, fit)
        method.fit_router(task)
    images = torch.cat([task.test.x[:4] for task in tasks[:2]])
    before = method.route(images)
    method.grow(0.5)
    assert method.route(images).equal(before)
    method.learn(tasks[2], fit)
    assert set(method.router.tasks()) == {0, 1, 2}


@both
def test_a_run_that_grows_and_is_killed_goes_on_to_the_same_record(name, tmp_path, monkeypatch):
    spec = Run(
        "pmnist",
        name,
        0,
        benchmark_options={"data": "sample", "tasks": 4},
        network_options={"widths": (12, 12)},
        method_options={"grow": "auto", "grow_below": 1.0},
        train_examples=100,
        regime=Regime(epochs=2, batch=250, optimizer="adam", lr=0.003, keep_state=True),
    )
    whole = run(spec, tmp_path / "whole", keep_model=True)
    kills = killed_at(monkeypatch, 0.1, seed=3, most=4)
    again = to_the_end(spec, tmp_path / "again", save_every=OFTEN, keep_model=True)
    assert kills
    assert_same(whole, again)
    one, two = (load(next((tmp_path / folder).glob("*.safetensors"))) for folder in ("whole", "again"))
    assert len(one.growth.steps) == 3
    assert all(torch.equal(value, two.state_dict()[key]) for key, value in one.state_dict().items())
    assert whole.parameters == one.num_parameters()


def test_convolutions_in_order_of_channels_last():
    tasks = toy_tasks(2, shape=SHAPE)
    with seeded(0, "trunk"):
        trunk = convolutions().to(memory_format=torch.channels_last)
    method = make("hat", tasks, trunk)
    method.learn(tasks[0], trainer())
    before = {0: answers(method, 0)}
    method.grow(0.5)
    assert method.net.trunk[4].weight.is_contiguous(memory_format=torch.channels_last)
    method.learn(tasks[1], trainer())
    assert_answers(method, before)


@both
def test_a_state_that_fits_already_leaves_all_modules(name):
    tasks = toy_tasks(2, shape=SHAPE)
    method = make(name, tasks, "norms")
    method.learn(tasks[0], trainer())
    method.grow(0.5)
    modules = [*method.modules()]
    method.load_state_dict(method.state_dict())
    assert all(one is two for one, two in zip(modules, method.modules(), strict=True))
