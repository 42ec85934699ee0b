"""`hr.protect` on a GPU in loops of other libraries: moves within a block, gradient scaling, the scripts of docs/loops."""

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.guarded import data, make_loop, state
from tests.helpers.loop_scripts import THEIRS, check, fresh_accelerator, load, needs  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(*THEIRS)]


def step(loop, name, number, device, scaler=None):
    x, y = (t.to(device) for t in data(number))
    loop.backbone.train()
    for part in torch.arange(48, device=device).split(12):
        loop.optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=scaler is not None):
            loss = F.cross_entropy(loop.heads[name](loop.backbone(x[part])), y[part])
        if scaler is None:
            loss.backward()
            loop.optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()


@pytest.mark.parametrize("method", ["hat", "pmask"])
def test_a_backbone_that_is_moved_to_the_gpu_and_back_within_a_block(method):
    """As Lightning does around `fit`. The state of the optimizer is moved by the loop, as Lightning does it, too."""
    loop = make_loop("cnn", torch.optim.SGD, method=method, lr=0.05)
    for number, name in enumerate("abc"):
        with loop.guard.learn(name, steps=4, own=[loop.heads[name]], settle=[data(number)[0]]):
            for module in (loop.backbone, loop.heads[name]):
                module.to("cuda")
            step(loop, name, number, "cuda")
            assert loop.guard.lesson.done == 4
            loop.backbone.eval()
            loop.backbone(data(number)[0].cuda())
            for module in (loop.backbone, loop.heads[name]):
                module.to("cpu")
        assert loop.changed() == []
        loop.answers[name] = loop.answer(name)
    assert loop.changed() == []
    assert {tensor.device.type for tensor in state(loop.backbone).values()} == {"cpu"}


def test_a_block_that_fails_after_a_move_is_rolled_back():
    loop = make_loop("cnn", torch.optim.SGD, lr=0.05)
    loop.learn("a")

    def learn():
        with loop.guard.learn("b", steps=4, own=[loop.heads["b"]], settle=[data(1)[0]]):
            for module in (loop.backbone, loop.heads["b"]):
                module.to("cuda")
            step(loop, "b", 1, "cuda")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        learn()
    for module in (loop.backbone, loop.heads["b"]):
        module.to("cpu")
    loop.learn("b", 1)
    assert loop.changed() == []


@pytest.mark.parametrize("fused", [False, True])
def test_float16_with_a_scaler(fused):
    loop = make_loop("cnn", fused=fused)
    for module in (loop.backbone, *loop.heads.values()):
        module.to("cuda")
    scaler, answers = torch.amp.GradScaler("cuda"), []
    for number, name in enumerate("ab"):
        with loop.guard.learn(name, steps=4, own=[loop.heads[name]], settle=[data(number)[0]]):
            for _ in range(4):
                step(loop, name, number, "cuda", scaler)
            assert 4 < loop.guard.lesson.done <= 16  # the scaler skips the first ones if its scale is too large
        with loop.guard.use("a"), torch.no_grad():
            answers.append(loop.heads["a"](loop.backbone(data(0)[0].cuda())))
    assert torch.equal(*answers)
    loop.guard.verify()


@needs("lightning")
def test_the_script_of_lightning(tmp_path, capsys):
    before, after = load("lightning_fit").main(tmp_path, "gpu")
    check(before, after, capsys.readouterr().out, tmp_path)


@needs("accelerate")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_script_of_accelerate(tmp_path, capsys, precision):
    before, after = load("accelerate_loop").main(tmp_path, "cuda", precision)
    check(before, after, capsys.readouterr().out, tmp_path)


@needs("transformers", "accelerate")
def test_the_script_of_hugging_face(tmp_path, capsys):
    before, after = load("hf_trainer").main(tmp_path, "cuda")
    check(before, after, capsys.readouterr().out, tmp_path)
