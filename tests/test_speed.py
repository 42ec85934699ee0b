"""What speed is measured against does the same as this library, and the clock is fair."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from hatrack import METHODS, Method, Network, Regime, Task, Trainer
from hatrack.engine.choice import can_compile
from hatrack.methods.parts.vectors import set_values, values
from hatrack.networks import NETWORKS
from hatrack.networks.mlp import mlp
from hatrack.tasks.split import Batch
from speed import contest, peers, table
from speed.authors import Authors, GatedAlexNet
from speed.clock import WARM, Contest, Row, in_turns
from speed.contest import AUTHORS, AVALANCHE, BY_HAND, GATED, HAT, PLAIN, SMALL, large, small, tensors
from speed.loops import BATCH, CLASSES, LOOPS, LR, SMAX, HATByHand, noise

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow  # the speed harness
COUNT = 40  # images of a task; batches of 10


def noisy_tasks(shape: tuple[int, ...], count: int = 2) -> list[Task]:
    tasks = []
    for number in range(count):
        x, y = noise(number, COUNT, shape)
        tasks.append(Task.from_arrays(number, f"noise {number}", x, y, x, y, valid=0.0))
    return tasks


def make(name: str, **options: object) -> Method:
    example = noisy_tasks((1, 4, 4))[0].train.inputs(torch.arange(2))
    trunk = mlp((1, 4, 4), widths=(12, 12), dropout=0.0, input_dropout=0.0)
    return METHODS[name](Network(trunk, [CLASSES] * 3, example, heads="shared"), **options)


def batches(task: Task) -> list[tuple[Tensor, Tensor, Tensor]]:
    x, y = tensors(task.train)
    return [(index, x[index], y[index]) for index in torch.arange(COUNT).split(10)]


def steps(task: Task, method: Method, *, lr: float = LR) -> None:
    """This library's own steps on the batches of a task, within the method's `learn`."""

    def fit(method: Method, task: Task, **how: object) -> None:
        course = Trainer(Regime(batch=10, lr=lr, clip=0), engine="eager").start(method, task, **how)
        method.train()
        for number, (index, _, _) in enumerate(batches(task)):
            course.step(index, torch.tensor(number))

    method.learn(task, fit)


def whole(method: Method) -> nn.Sequential:
    """A copy of the method's trunk and shared head, as a plain module."""
    net = nn.Sequential(mlp((1, 4, 4), widths=(12, 12), dropout=0.0, input_dropout=0.0), nn.Linear(12, CLASSES))
    set_values(list(net.parameters()), values(list(method.net.parameters())))
    return net


@pytest.mark.parametrize("name", ["sgd", "si"])
def test_plain_loops_do_what_the_methods_do(name):
    tasks = noisy_tasks((1, 4, 4), 3)
    method = make(name)
    start = values(list(method.net.parameters()))
    loop = LOOPS[name](whole(method))
    for task in tasks:
        steps(task, method)
        for _, x, y in batches(task):
            loop.step(x, y)
        loop.finish(*tensors(task.train))
    if name == "si":
        torch.testing.assert_close(torch.cat([i.flatten() for i in loop.importances]), method.importance)
        assert method.importance.max() > 1e-4, "importances of nothing would prove nothing"
    now = values(list(method.net.parameters()))
    torch.testing.assert_close(values(loop.weights), now)
    assert (now - start).abs().max() > 0.01


def test_the_plain_loop_of_ewc_does_what_ewc_does():
    """With the same Fishers: the loop has an anchor for every task, the method has merged them into one."""
    (task,) = noisy_tasks((1, 4, 4), 1)
    method = make("ewc", strength=LOOPS["ewc"](nn.Linear(1, 1)).strength, limit=0.0)
    loop = LOOPS["ewc"](whole(method))
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        moved = values(loop.weights).detach() + 0.1 * torch.randn(len(method.fisher), generator=draw)
        for weights in (loop.weights, list(method.net.parameters())):
            set_values(weights, moved)
        fisher = 0.01 * torch.rand(len(moved), generator=draw)
        method.consolidate(fisher)
        sizes = [weight.numel() for weight in loop.weights]
        pairs = zip(loop.weights, moved.split(sizes), fisher.split(sizes), strict=True)
        loop.anchors.append([(anchor.view_as(weight), f.view_as(weight)) for weight, anchor, f in pairs])
    before = values(loop.weights).detach()
    free = LOOPS["sgd"](whole(method))
    steps(task, method)
    for _, x, y in batches(task):
        loop.step(x, y)
        free.step(x, y)
    torch.testing.assert_close(values(loop.weights), values(list(method.net.parameters())))
    assert (values(free.weights) - values(loop.weights)).abs().max() > 0.1 * (values(loop.weights) - before).abs().max()


def test_the_fisher_of_the_plain_loop():
    x, y = noise(0, 2 * BATCH, (1, 2, 2))
    loop = LOOPS["ewc"](nn.Sequential(nn.Flatten(), nn.Linear(4, CLASSES)))
    loop.finish(x.float(), y)
    (anchor, fisher), _ = loop.anchors[0]
    squares = []
    for part in (slice(0, BATCH), slice(BATCH, None)):
        logits = x[part].float().flatten(1) @ anchor.T + loop.weights[1].detach()
        error = logits.softmax(1) - nn.functional.one_hot(y[part], CLASSES)  # d loss / d logits
        squares.append((error.T @ x[part].float().flatten(1) / BATCH) ** 2)
    torch.testing.assert_close(fisher, (squares[0] + squares[1]) / 2, rtol=1e-3, atol=1e-3)


def test_the_loop_of_the_authors_does_what_hat_does():
    """The paper's soft masks, the authors' annealing, no dropout; two tasks, the second held by the first. At smax = 400 the
    compensation would multiply rounding errors as well, by up to 160,000."""
    smax = 8.0
    tasks = noisy_tasks((3, 32, 32))
    trunk = NETWORKS["alexnet"]((3, 32, 32), dropout=0.0, early_dropout=0.0)
    net = Network(trunk, [CLASSES] * 2, tasks[0].train.inputs(torch.arange(2)))
    method = METHODS["hat"](net, smax=smax, masks="soft", anneal="authors", gate_lr=1.0)
    theirs = GatedAlexNet([CLASSES] * 2, dropout=0.0, early_dropout=0.0)
    set_values(list(theirs.layers.parameters()), values(list(trunk.parameters())))
    set_values(list(theirs.heads.parameters()), values(list(net.heads.parameters())))
    widths = [layer.weight.shape[0] for layer in theirs.layers]
    with torch.no_grad():
        method.embeddings[0][0] = 7.0  # beyond the limit
        for task, row in enumerate(method.embeddings):
            for embedding, piece in zip(theirs.embeddings, row.split(widths), strict=True):
                embedding.weight[task] = piece
    start = torch.stack([row.detach().clone() for row in method.embeddings])
    loop = Authors(theirs, smax=smax, lr=1.0, clip=math.inf)
    for task in tasks:
        before = [p.detach().clone() for p in theirs.layers.parameters()]
        theirs.train()
        for number, (_, x, y) in enumerate(batches(task)):
            loop.step(task.index, x, y, 1 / smax + (smax - 1 / smax) * 10 * number / COUNT)
        steps(task, method, lr=1.0)
        loop.finish(task.index)
        for old, new, ours in zip(before, theirs.layers.parameters(), trunk.parameters(), strict=True):
            assert (new - old).abs().max() > 1e-4
            assert (new - ours).norm() < 1e-3 * (new - old).norm(), "the same way, not only the same place"
    held = torch.cat([(new == old).flatten() for new, old in zip(theirs.layers.parameters(), before, strict=True)])
    assert 0.05 < held.float().mean() < 0.95
    after = torch.stack([torch.cat([e.weight[task] for e in theirs.embeddings]) for task in range(2)])
    ours = torch.stack(list(method.embeddings))
    assert ((after - start).abs().median(1).values > 1e-4).all()
    torch.testing.assert_close(after - start, ours - start, rtol=0.01, atol=2e-6)
    assert ours[0, 0] <= 6
    x, y = tensors(tasks[1].train)
    theirs.eval()
    torch.testing.assert_close(theirs(x, 1, smax)[0][1], method.eval()(x, 1), rtol=1e-3, atol=1e-3)
    loss, accuracy = loop.evaluate(1, x, y)
    assert accuracy == (method(x, 1).argmax(1) == y).sum().item() / COUNT
    assert loss > nn.functional.cross_entropy(method(x, 1), y).item()  # it includes the capacity term


def test_turns_are_taken_in_turn():
    calls = []

    def turn(name: str, seconds: list[float]):
        def one() -> float:
            calls.append(name)
            return seconds[calls.count(name) - 1]

        return one

    rows = in_turns({"a": turn("a", [9] * WARM + [2, 4, 3]), "b": turn("b", [9] * WARM + [1, 1, 2])}, rounds=3, per=2)
    assert "".join(calls) == "ab" * (WARM + 3)
    assert [row.seconds for row in rows] == [[1, 2, 1.5], [0.5, 0.5, 1]], "warm-up left out, per step"
    assert rows[0].median == 1.5
    assert rows[0].times(rows[1]) == (2, 1.75, 3), "the median of 2, 4 and 1.5, and the quartiles"
    assert Row("fleet", [3.0]).times(rows[0]) == (2, 2, 2)


def test_who_cannot_start_is_left_out_and_who_fails_later_is_an_error():
    def no_compiler() -> float:
        raise RuntimeError("no compiler\nand more")

    rows = in_turns({"a": lambda: 1.0, "b": no_compiler}, rounds=2, per=1)
    assert rows == [Row("a", [1.0, 1.0]), Row("b", skipped="no compiler")]
    count = iter(range(WARM + 2))

    def fails_later() -> float:
        if next(count) == WARM + 1:
            raise RuntimeError("lost")
        return 1.0

    with pytest.raises(RuntimeError, match="lost"):
        in_turns({"a": fails_later}, rounds=2, per=1)


@pytest.mark.parametrize("pair", SMALL, ids=lambda pair: pair.method)
def test_contests_on_the_perceptron(pair, monkeypatch):
    monkeypatch.setattr(peers, "PYTHON", peers.ROOT / "nowhere")
    result, versions = small(pair, ["eager", "recorded"], steps=2, rounds=2)
    by_name = {row.name: row for row in result.rows}
    assert versions == {}
    assert by_name["hatrack, recorded"].skipped == "--engine recorded needs a GPU"
    assert by_name[AVALANCHE].skipped == "`make peers` sets up its environment"
    for name in ("hatrack, eager", PLAIN):
        assert len(by_name[name].seconds) == 2
        assert min(by_name[name].seconds) > 0
    assert result.usual == ("hatrack, eager", "hatrack, compiled")[: 1 + can_compile(gpu=False)]


def test_hat_on_the_perceptron_is_compared_with_plain_sgd():
    result, _ = small(GATED, ["eager"], steps=2, rounds=2)
    by_name = {row.name: row for row in result.rows}
    assert "no hat" in by_name[AVALANCHE].skipped
    said = table.verdicts([result])
    assert len(said) == 1
    assert "hatrack, eager takes" in said[0]
    assert "at most 1.1 is asked for" in said[0]
    assert min(by_name[BY_HAND].seconds) > 0


def test_hat_by_hand_is_hat():
    """The same gradients of weights and embeddings as the library's, at a hardness in the middle of an epoch."""
    hand, tasks = HATByHand(contest.perceptron()), GATED.tasks(3 * BATCH, 0.0, CPU, raw=False)
    method = replace(GATED, task=1).prepare(tasks[1:])
    copied = zip(method.net.parameters(), hand.weights, strict=True)
    with torch.no_grad():
        for own, other in copied:
            own.copy_(other)
        method.embeddings[0].copy_(hand.e)
    method.begin_task(0)
    x, y = tensors(tasks[1].train)
    method.loss(Batch(x, y, 0, torch.tensor(1), torch.tensor(3), torch.tensor(0.5))).backward()
    hand.s = 1 / SMAX + (SMAX - 1 / SMAX) / 2
    before = [p.detach().clone() for p in [hand.e, *hand.weights]]
    hand.step(x, y)
    for old, new, own in zip(before, [hand.e, *hand.weights], [method.embeddings[0], *method.net.parameters()], strict=True):
        torch.testing.assert_close((old - new) / LR, own.grad, rtol=1e-3, atol=1e-5)


def test_the_perceptrons_are_the_same():
    for pair in SMALL:
        method = pair.prepare(pair.tasks(BATCH, 0.0, CPU, raw=False))
        ours = [tuple(p.shape) for p in method.net.parameters()]
        assert ours == [tuple(p.shape) for p in contest.perceptron().parameters()]


def test_contests_on_alexnet(monkeypatch):
    monkeypatch.setattr(contest, "EARLIER", 1)
    found = []
    large(["eager"], CPU, 20, 1, found.append)
    training, epoch = found
    assert training.unit == "step"
    assert epoch.unit == "epoch"
    assert "17 images to train on, 3 to validate" in epoch.title
    for result in (training, epoch):
        assert all(result.row(name).median > 0 for name in ("hatrack, eager", AUTHORS))
    contest.fleets(["recorded"], CPU, 3, found.append)
    assert len(found) == 2, "fleets in one process are for a GPU"


@pytest.mark.gpu
def test_contests_on_a_gpu():
    found, device = [], torch.device("cuda")
    large(["eager", "recorded"], device, 640, 2, found.append)
    contest.fleets(["recorded"], device, 2, found.append)
    training, epoch, fleet = found
    assert [row.name for row in training.rows if row.seconds] == ["hatrack, eager", "hatrack, recorded", AUTHORS]
    assert all(row.seconds for row in epoch.rows)
    assert [row.name for row in fleet.rows] == ["hatrack, recorded, 2 seeds side by side"]


def test_every_contest_is_written_as_soon_as_it_is_over(monkeypatch, tmp_path):
    def measure(words, done):
        done(MADE_UP[0], {"Avalanche": "1"})
        assert "mlp, sgd" in out.read_text()
        raise KeyboardInterrupt

    out = tmp_path / "speed.md"
    monkeypatch.setattr(table, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["table", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        table.main()
    assert "Avalanche 1" in out.read_text()


def test_the_rate_of_a_fleet_is_taken_while_all_are_at_work():
    assert contest.together([[1, 2, 3, 4], [1, 2, 3, 4]], warm=2) == 2  # two epochs per second, one of each
    late = [[1, 2, 3, 4, 5], [5, 9, 11, 13, 15]]  # the first had the GPU for itself and was done before the second was warm
    with pytest.raises(ValueError, match="more epochs"):
        contest.together(late, warm=2)
    assert contest.together([[1, 2, 4, 6], [2, 3, 5, 7]], warm=2) == pytest.approx(1), "from 3 to 6, half an epoch each"


def test_both_loops_of_hat_are_at_the_second_task():
    tasks = HAT.tasks(20, 0.15, CPU, raw=True)
    assert [task.index for task in tasks] == [0, 1]
    assert tasks[-1].train.x.dtype == torch.uint8
    method = HAT.prepare(tasks)
    assert method.done.tolist() == [True, False]
    assert contest._authors(tasks, CPU).free.keys() == {
        f"layers.{k}.{part}" for k in range(5) for part in ("weight", "bias")
    }


def test_a_peer_that_fails_says_why(monkeypatch):
    """This environment has no Avalanche."""
    monkeypatch.setattr(peers, "PYTHON", peers.Path(sys.executable))
    with pytest.raises(peers.Missing, match="No module named 'avalanche'"):
        peers.Peer("sgd", task=1, steps=1)


@pytest.mark.slow
@pytest.mark.skipif(not peers.PYTHON.exists(), reason="`make peers` sets up the environment")
@pytest.mark.parametrize("pair", SMALL, ids=lambda pair: pair.method)
def test_avalanche(pair):
    with peers.Peer(pair.method, task=pair.task, steps=3) as peer:
        assert peer.versions["torch"].startswith("2.13.0")
        seconds = [peer.epoch() for _ in range(2)]
    assert min(seconds) > 0
    assert peer.process.returncode == 0


MADE_UP = [
    Contest(
        "mlp, sgd, task 1",
        "step",
        [Row("hatrack, eager", [1e-3]), Row(PLAIN, [2e-3]), Row(AVALANCHE, [4e-3]), Row("hatrack, recorded", skipped="a|b")],
        ("hatrack, eager",),
    ),
    Contest("GPU: a whole epoch", "epoch", [Row("hatrack, compiled", [0.2]), Row(AUTHORS, [2.0])], ("hatrack, compiled",)),
]


def test_what_the_table_says():
    assert table.lines(MADE_UP[0]) == [
        ("hatrack, eager", "1 ms per step", "0.50", "0.25"),
        (PLAIN, "2 ms per step", "", "0.50"),
        (AVALANCHE, "4 ms per step", "2.00", ""),
        ("hatrack, recorded", "a/b", "", ""),
    ]
    assert table.lines(MADE_UP[1])[0] == ("hatrack, compiled", "200 ms per epoch", "0.100", "")
    said = table.verdicts(MADE_UP)
    assert [line.rpartition(": ")[2] for line in said] == ["reached", "reached", "MISSED"]
    assert "0.250 times as long as Avalanche" in said[0]
    assert "at most 0.0667" in said[2]
    console = Console(width=100)
    with console.capture() as shown:
        table.show(MADE_UP, console)
    assert "200 ms per epoch" in shown.get()


@pytest.mark.parametrize(("seconds", "word"), [([0.5, 0.6, 0.7], "reached"), ([2, 3, 2], "MISSED"), ([0.9, 1, 2], "noise")])
def test_a_verdict_knows_the_noise(seconds, word):
    one = Contest(
        "mlp, sgd, task 1", "step", [Row("hatrack, eager", seconds), Row(PLAIN, [1.0, 1.0, 1.0])], ("hatrack, eager",)
    )
    assert table.verdicts([one])[0].endswith(word)


def test_times_are_written_in_a_unit_that_fits():
    assert [table.span(s) for s in (2.5, 0.25, 2.5e-4, 2.5e-7)] == ["2.5 s", "250 ms", "250 µs", "0.25 µs"]


def test_a_device_has_one_section_and_leaves_the_others_alone():
    first = table.section(MADE_UP, "GPU A", "facts", "command")
    page = table.put(table.put("", first), table.section(MADE_UP[:1], "CPU B", "facts", "command"))
    again = table.put(page, table.section(MADE_UP[1:], "GPU A", "new facts", "command"))
    assert again.startswith("# Speed\n")
    assert again.count("\n## ") == 2
    assert again.count("mlp, sgd, task 1\n") == 1, "of CPU B alone"
    assert "new facts" in again
    assert table.put(again, table.section(MADE_UP[1:], "GPU A", "new facts", "command")) == again


def test_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["table", "--device", "cpu"])
    assert table.arguments().engines == ["eager", "compiled", "recorded"]
    assert table.arguments().out == table.OUT
    monkeypatch.setattr(sys, "argv", ["table", "--device", "cpu", "--quick"])
    assert table.arguments().engines == ["eager", "recorded"]
    assert table.arguments().out is None
    monkeypatch.setattr(sys, "argv", ["table", "--engines", "eagr"])
    with pytest.raises(SystemExit):
        table.arguments()
    assert "did you mean 'eager'" in capsys.readouterr().err
