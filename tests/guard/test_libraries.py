"""What Lightning, Accelerate and the Trainer of Hugging Face do beyond the scripts of docs/loops: traps and errors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hatrack as hr
from tests.helpers.guarded import BACKBONES, PROBE, WIDTH, data, make_loop
from tests.helpers.loop_scripts import THEIRS, fresh_accelerator, needs  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*THEIRS)]  # importing them takes seconds


def loader(number):
    return DataLoader(TensorDataset(*data(number)), batch_size=12)


def answer(guard, head, name="a"):
    with guard.use(name), torch.no_grad():
        return head(guard.backbone(PROBE))


# Lightning


def lightning_model(guard, head, *, known=True, rate=0.05):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = guard.backbone, head

        def training_step(self, batch, index):
            return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

        def test_step(self, batch, index):
            self.log("loss", self.training_step(batch, index))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9, weight_decay=0.1)
            if known:
                guard.add_optimizer(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    return Module()


def lightning_trainer(folder, **options):
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(max_epochs=3, default_root_dir=folder, **{**quiet, **options})


@needs("lightning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_makes_the_optimizer_within_the_block(tmp_path, precision):
    loop, answers = make_loop("cnn"), []
    for number, name in enumerate("ab"):
        trainer = lightning_trainer(tmp_path, precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.5)
        with loop.guard.learn(name, steps=2, own=[loop.heads[name]], settle=loader(number)):
            trainer.fit(lightning_model(loop.guard, loop.heads[name]), loader(number))
            assert loop.guard.lesson.done == 6
        answers.append(answer(loop.guard, loop.heads["a"]))
    assert torch.equal(*answers)
    loop.guard.verify()


@needs("lightning")
def test_an_optimizer_of_lightning_that_the_guard_does_not_know(tmp_path):
    loop = make_loop("mlp")
    with (
        pytest.raises(ValueError, match=r"guard\.add_optimizer"),
        loop.guard.learn("a", steps=4, own=[loop.heads["a"]]),
    ):
        lightning_trainer(tmp_path).fit(lightning_model(loop.guard, loop.heads["a"], known=False), loader(0))
    loop.learn("a")
    assert loop.changed() == []


@needs("lightning")
def test_the_best_checkpoint_of_lightning_after_the_block_is_refused(tmp_path):
    """`trainer.test(ckpt_path=...)` loads an epoch that is not the one with which the task was finished."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    loop, every = make_loop("mlp"), ModelCheckpoint(tmp_path, save_top_k=-1)
    model, trainer = lightning_model(loop.guard, loop.heads["a"]), lightning_trainer(tmp_path, callbacks=[every])
    with loop.guard.learn("a", steps=4, own=[loop.heads["a"]]):
        trainer.fit(model, loader(0))
    before = answer(loop.guard, loop.heads["a"])
    first = sorted(tmp_path.glob("*.ckpt"))[0]
    with loop.guard.use("a"):
        with pytest.raises(ValueError, match="load_state_dict would change"):
            trainer.test(model, loader(0), ckpt_path=str(first), verbose=False)
        lightning_trainer(tmp_path).test(model, loader(0), verbose=False)
    assert torch.equal(before, answer(loop.guard, loop.heads["a"]))


@needs("lightning")
@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_a_module_in_evaluation_mode_is_not_trained_by_lightning(tmp_path):
    loop = make_loop("mlp")
    loop.backbone.eval()
    with (
        pytest.raises(ValueError, match=r"evaluation mode.*backbone\.train\(\)"),
        loop.guard.learn("a", steps=4, own=[loop.heads["a"]]),
    ):
        lightning_trainer(tmp_path).fit(lightning_model(loop.guard, loop.heads["a"]), loader(0))


# Accelerate


def accelerated(order, precision="bf16"):
    """A guard on a backbone that Accelerate prepares by itself, before or after it is protected."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    backbone, heads = BACKBONES["cnn"](), {name: nn.Linear(WIDTH, 3) for name in "ab"}
    held = [*backbone.parameters(), *(p for head in heads.values() for p in head.parameters())]
    optimizer = torch.optim.AdamW(held, lr=0.01, weight_decay=0.1)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    if order == "prepare":
        backbone, optimizer = accelerator.prepare(backbone, optimizer)
    guard = hr.protect(backbone, optimizer, example=PROBE[:2])
    if order == "protect":
        backbone, optimizer = accelerator.prepare(backbone, optimizer)
    return accelerator, guard, backbone, heads, optimizer


def accelerated_epochs(accelerator, backbone, head, optimizer, number, epochs=3):
    backbone.train()
    for _ in range(epochs):
        for x, y in loader(number):
            accelerator.backward(F.cross_entropy(head(backbone(x)), y))
            accelerator.clip_grad_norm_(backbone.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@needs("accelerate")
@pytest.mark.parametrize("order", ["protect", "prepare"])
def test_a_backbone_that_accelerate_prepares(order):
    accelerator, guard, backbone, heads, optimizer = accelerated(order)
    answers = []
    for number, (name, head) in enumerate(heads.items()):
        with guard.learn(name, steps=4, own=[head], settle=loader(number)):
            accelerated_epochs(accelerator, backbone, head, optimizer, number)
            assert guard.lesson.done == 12
        answers.append(answer(guard, heads["a"]))
    assert torch.equal(*answers)
    guard.verify()


@needs("accelerate")
def test_a_state_of_accelerate_within_a_block(tmp_path):
    """Weights, gates and optimizer go back to where they were saved, and the same steps give the same task."""
    accelerator, guard, backbone, heads, optimizer = accelerated("protect", "no")
    with guard.learn("a", steps=4, own=[heads["a"]], settle=loader(0)):
        accelerated_epochs(accelerator, backbone, heads["a"], optimizer, 0)
        accelerator.save_state(tmp_path)
        then = guard.module.embedding.detach().clone()
        head = {key: value.clone() for key, value in heads["a"].state_dict().items()}
        accelerated_epochs(accelerator, backbone, heads["a"], optimizer, 0)
        assert not torch.equal(then, guard.module.embedding)
        accelerator.load_state(tmp_path)
        heads["a"].load_state_dict(head)
        assert torch.equal(then, guard.module.embedding)
        assert guard.module.embedding not in optimizer.state
        accelerated_epochs(accelerator, backbone, heads["a"], optimizer, 0)
    assert guard.verify().keys() == {"a"}


# Hugging Face


def hugging_face(guard, head, folder, number, callbacks=(), **options):
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = guard.backbone, head

        def forward(self, x, labels):
            logits = self.head(self.backbone(x))
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    given = {"output_dir": str(folder), "num_train_epochs": 3, "per_device_train_batch_size": 6, "learning_rate": 0.01}
    given |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    rows = [{"x": x, "labels": int(y)} for x, y in zip(*data(number), strict=True)]
    return Trainer(Model(), TrainingArguments(**{**given, **options}), train_dataset=rows, callbacks=list(callbacks))


@needs("transformers", "accelerate")
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor"])
def test_a_callback_tells_the_guard_the_optimizer(tmp_path, optim):
    from transformers import TrainerCallback

    loop, answers = make_loop("cnn"), []

    class Add(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **others):
            loop.guard.add_optimizer(optimizer)

    for number, name in enumerate("ab"):
        options = {"optim": optim, "gradient_accumulation_steps": 2, "weight_decay": 0.1, "bf16": True}
        trainer = hugging_face(loop.guard, loop.heads[name], tmp_path, number, [Add()], **options)
        with loop.guard.learn(name, steps=4, own=[loop.heads[name]], settle=loader(number)):
            trainer.train()
            assert loop.guard.lesson.done == 12
        answers.append(answer(loop.guard, loop.heads["a"]))
    assert torch.equal(*answers)
    loop.guard.verify()


@needs("transformers", "accelerate")
def test_an_optimizer_of_the_trainer_that_the_guard_does_not_know(tmp_path):
    loop = make_loop("mlp")
    with (
        pytest.raises(ValueError, match=r"guard\.add_optimizer"),
        loop.guard.learn("a", steps=8, own=[loop.heads["a"]]),
    ):
        hugging_face(loop.guard, loop.heads["a"], tmp_path, 0).train()
    assert not loop.guard.tasks
