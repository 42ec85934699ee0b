"""Two text tasks by the Trainer of Hugging Face, on a small BERT from a config, with the best checkpoint of each."""

import random
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

import hatrack as hr

FILL = ["the", "a", "my", "our", "this", "that", "old", "new", "big", "small", "very", "today", "here", "and", "with"]
TASKS = {  # words that decide the class, in place of your texts
    "mood": [["good", "fine", "lovely", "great"], ["bad", "sad", "awful", "poor"]],
    "topic": [["guitar", "drum", "song"], ["soup", "bread", "cheese"], ["ball", "goal", "team"]],
}
WORDS = ["<pad>", "<cls>", *FILL, *(word for classes in TASKS.values() for words in classes for word in words)]
LENGTH = 10


def made_up_texts(name, seed, count):
    """Made-up sentences of 4 to 9 words with one word of their class, as token ids that are padded to one length."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        label = number % len(TASKS[name])
        words = [draw.choice(FILL) for _ in range(draw.randint(3, LENGTH - 2))]
        words.insert(draw.randint(0, len(words)), draw.choice(TASKS[name][label]))
        ids = [WORDS.index(word) for word in ["<cls>", *words]]
        rows.append({"input_ids": ids + [0] * (LENGTH - len(ids)), "labels": label})
    return rows


class Encoder(nn.Module):
    """The backbone: BERT from one tensor of token ids to one vector per text. It makes the mask of the ids."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=LENGTH, **sizes)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, ids):
        mask = (ids != 0)[:, None, None, :]  # of this shape BERT takes it as it is, and reads no values of it
        return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]


class Classifier(nn.Module):
    """One task as the Trainer takes it: the backbone, which all tasks share, and a head of its own."""

    def __init__(self, backbone, classes):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(64, classes)

    def forward(self, input_ids, labels):
        logits = self.head(self.backbone(input_ids))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def make_trainer(model, name, folder, device):
    arguments = TrainingArguments(
        output_dir=str(Path(folder) / name), num_train_epochs=8, per_device_train_batch_size=16, learning_rate=2e-3,
        weight_decay=0.01, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        use_cpu=device == "cpu", report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    data = {"train_dataset": made_up_texts(name, 0, 480), "eval_dataset": made_up_texts(name, 1, 60)}
    return Trainer(model, arguments, **data)


def main(folder, device="cpu"):
    torch.manual_seed(0)
    backbone = Encoder()
    models = {name: Classifier(backbone, len(classes)) for name, classes in TASKS.items()}
    trainers = {name: make_trainer(model, name, folder, device) for name, model in models.items()}
    example = torch.tensor([row["input_ids"] for row in made_up_texts("mood", 0, 4)], device=trainers["mood"].args.device)
    guard = hr.protect(backbone, [trainer.create_optimizer() for trainer in trainers.values()], example=example)
    before = {}
    for name, trainer in trainers.items():
        steps = len(trainer.get_train_dataloader()) // trainer.args.gradient_accumulation_steps
        with guard.learn(name, steps=steps, own=[models[name].head]):
            trainer.train()  # it ends with the best checkpoint, the gates among its values
        with guard.use(name):
            before[name] = torch.tensor(trainer.predict(trainer.eval_dataset).predictions)

    after = {}
    for name, trainer in trainers.items():
        with guard.use(name):
            found = trainer.predict(trainer.eval_dataset)
        after[name] = torch.tensor(found.predictions)
        right = (found.predictions.argmax(1) == found.label_ids).mean()
        print(f"{name}: {right:.0%} right, {'the same bits' if torch.equal(before[name], after[name]) else 'changed'}")
    guard.verify()
    guard.save(Path(folder) / "v1.safetensors")
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
