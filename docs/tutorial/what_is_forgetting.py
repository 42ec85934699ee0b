"""The tutorial "What is forgetting?": plain training forgets, HAT does not; 15 minutes on the sample images."""
# %% [markdown]
# # What is forgetting?
#
# A neural network that learns a second task usually loses the first one. This is called *catastrophic forgetting*. In
# this tutorial you will watch it happen, find out where in the network it happens, and then train a network that
# forgets nothing.
#
# You need 15 minutes, two processor cores and no downloads: the images ship with hatrack. You should know what a
# neural network, a loss and a gradient are, and have written a little PyTorch. New words are explained where they
# appear first; the glossary has them all.
#
# You can read this page, run the file as a script (`python docs/tutorial/what_is_forgetting.py`), or make it a
# notebook (`make tutorial`) and change things. Changing things is the best way.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import hatrack as hr

# %% [markdown]
# ## 1. The tasks
#
# A **task** is one thing to learn: images, their classes, and a split into training, validation and test data. The
# benchmark `digits-and-clothes` has six tasks. Each has three classes: three digits of MNIST, or three kinds of
# clothes of Fashion-MNIST. The number 0 is the **seed**: everything random depends on it, so your numbers will be
# close to those on this page.

# %%
tasks = hr.BENCHMARKS["digits-and-clothes"](0, data="sample")
for task in tasks:
    print(task)

# %%
figure, axes = plt.subplots(2, 6, figsize=(7, 2.8), layout="constrained")
for column, task in enumerate(tasks):
    for row in range(2):
        image = task.test.inputs(torch.tensor([row]))[0, 0]  # (height, width)
        axes[row, column].imshow(image, cmap="gray")
        axes[row, column].set_axis_off()
    axes[0, column].set_title(f"task {column}\n{task.name}", fontsize=8)
plt.show()

# %% [markdown]
# ## 2. One network for all tasks
#
# Our network has two parts. The **trunk** turns an image into a vector of 100 features, and all tasks share it. On
# top of it every task has its own **head**, a single linear layer that turns features into three outputs, one per
# class. When we ask the network something, we say which task we mean, so that the right head answers.
#
# We make room for five tasks. The sixth will be a surprise later.


# %%
def new_network() -> hr.Network:
    torch.manual_seed(0)  # the same initial weights every time
    layers = [nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()]
    trunk = nn.Sequential(nn.Flatten(), *layers)
    return hr.Network(trunk, classes=[3, 3, 3, 3, 3], example=torch.rand(2, 1, 28, 28))


net = new_network()
print("weights in the trunk:", sum(p.numel() for p in net.trunk.parameters()))
print("weights in each head:", sum(p.numel() for p in net.heads[0].parameters()))

# %% [markdown]
# ## 3. Plain training forgets
#
# The simplest method trains on the first task, then goes on with the second, and so on. In hatrack this is
# `hr.Method`. A **regime** says how every task is trained (here: six epochs of SGD with momentum), and a `Trainer`
# does it. After each task we measure the accuracy on the test data of *all* tasks so far.


# %%
def learn_all(method: hr.Method, tasks: list[hr.Task]) -> list[list[float]]:
    """Learn the tasks in turn. Row k: accuracies on tasks 0 to k, after task k."""
    fit = hr.Trainer(hr.Regime(epochs=6, optimizer="momentum"))
    rows = []
    for k, task in enumerate(tasks):
        method.learn(task, fit)
        rows.append([hr.evaluate(method, old.test).accuracy for old in tasks[: k + 1]])
        print(f"after task {k}:", "  ".join(f"{share:6.1%}" for share in rows[-1]))
    return rows


sgd = hr.Method(net)
sgd_rows = learn_all(sgd, tasks[:5])

# %% [markdown]
# Read the table by columns. The first column is task 0: the digits 0, 1 and 2. Right after it was learned, the
# network recognises nearly all of them. Nobody has touched these images since, and yet the accuracy falls. That is
# forgetting.


# %%
def plot_task(number: int, curves: dict[str, list[list[float]]]) -> None:
    """The accuracy on one task after every task that was learned."""
    _, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    for (label, rows), style in zip(curves.items(), ("o-", "s--"), strict=False):
        column = [row[number] for row in rows[number:]]
        axis.plot(range(number, len(rows)), column, style, label=label)
    axis.axhline(1 / 3, color="gray", linestyle=":", label="guessing")
    axis.set(xlabel="last task that was learned", ylabel=f"accuracy on task {number}")
    axis.set_ylim(0.2, 1.03)
    axis.set_xticks(range(number, 5))
    axis.legend()
    plt.show()


plot_task(0, {"plain training": sgd_rows})


# %% [markdown]
# We can put a number to it. The **forgetting** of a task is the best accuracy it had from when it was learned until
# before the last task was learned, minus the accuracy it has in the end.


# %%
def forgetting(rows: list[list[float]]) -> float:
    """The mean over all tasks but the last, which nothing came after."""
    last = rows[-1]
    fallen = [max(row[k] for row in rows[k:-1]) - last[k] for k in range(len(last) - 1)]
    return sum(fallen) / len(fallen)


print(f"average accuracy in the end: {sum(sgd_rows[-1]) / 5:.1%}")
print(f"forgetting: {forgetting(sgd_rows):.3f}")

# %% [markdown]
# ## 4. Where does it happen?
#
# Each task has its own head. Does training on clothes change the head of the digits? We train a fresh network on two
# tasks and look.

# %%
witness = hr.Method(new_network())
fit = hr.Trainer(hr.Regime(epochs=6, optimizer="momentum"))
witness.learn(tasks[0], fit)
head_before = witness.net.heads[0].weight.clone()
trunk_before = witness.net.trunk[1].weight.clone()
witness.learn(tasks[1], fit)

head_after = witness.net.heads[0].weight
print("the head of task 0 is unchanged:", torch.equal(head_before, head_after))
moved = (witness.net.trunk[1].weight - trunk_before).norm() / trunk_before.norm()
print(f"the first layer of the trunk has moved by {moved:.0%} of its length")

# %% [markdown]
# The head is the same, bit for bit. What has changed is the trunk. The gradient of task 1 says how to move each
# weight so that clothes are recognised better. It knows nothing about digits, so it moves weights that the digits
# need as freely as any other. The old head now reads features that mean something else.
#
# There are three families of remedies:
#
# - **Penalties**: pull important weights back to their old values (EWC, SI, MAS). Less is forgotten, but nothing is
#   guaranteed.
# - **Memories**: keep some old images and train on them again (ER, A-GEM).
# - **Masks**: give each task a part of the network, and never change that part again (HAT, PMASK, PackNet).
#
# We try the third.
#
# ## 5. HAT: every task gets its own units
#
# HAT stands for *hard attention to the task* (Serrà et al., 2018). Every task has a **gate** for every unit of the
# trunk. An open gate (1) lets the output of the unit through, a closed one (0) makes it zero. The gates are learned
# together with the weights: during an epoch they become harder and harder, until each is practically 0 or 1. A small
# term in the loss asks each task to open few gates, so that something is left for the others.
#
# When a task is finished, its gates are fixed. The weights between its open units are frozen: no later task can
# change them. Later tasks may *use* those units, but they can only train weights that are still free.
#
# Only one line of our program changes: `hr.HAT` in place of `hr.Method`.

# %%
hat = hr.HAT(new_network())
hat_rows = learn_all(hat, tasks[:5])
print(f"average accuracy in the end: {sum(hat_rows[-1]) / 5:.1%}")
print(f"forgetting: {forgetting(hat_rows):.3f}")

# %%
plot_task(0, {"plain training": sgd_rows, "HAT": hat_rows})

# %% [markdown]
# Every column of the table is constant. This is not luck, and it is not "almost the same". We can test it on the raw
# outputs (**logits**): learn one more task, and compare all bits.
#
# ## 6. A new task comes later
#
# Remember the sixth task? The network was made for five. `add_task` makes room for one more.

# %%
images = tasks[0].test.inputs(torch.arange(100))
before = hat.eval()(images, task=0)

number = hat.net.add_task(classes=3)
result = hat.learn(tasks[number], fit)
print(result)

after = hat.eval()(images, task=0)
print("task 0 gives the same logits, bit for bit:", torch.equal(before, after))
assert torch.equal(before, after)

# %% [markdown]
# The same question to the network that was trained plainly gives another answer:

# %%
before = sgd.eval()(images, task=0)
sgd.net.add_task(classes=3)
sgd.learn(tasks[5], fit)
after = sgd.eval()(images, task=0)
print("plain training gives the same logits:", torch.equal(before, after))
print(f"the largest change of a logit: {(before - after).abs().max():.2f}")
assert not torch.equal(before, after)

# %% [markdown]
# ## 7. Nothing is free: capacity
#
# Frozen weights are gone for later tasks. `usage()` says which share of the units of each layer the finished tasks
# have taken. This is the **capacity** that is used up.

# %%
for layer, share in hat.usage().items():
    print(f"layer {layer}: {share:.0%} of the units are taken")

# %% [markdown]
# Which task uses which units? Each row of the picture is a task, each column one of the 100 units of the last layer.
# A dark cell is an open gate. Later tasks open units that earlier tasks have taken: they reuse what is already known,
# and that costs nothing.

# %%
last = hat.units.layers["3"]  # which of all gates belong to the last layer
figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
axis.imshow(hat.gates[:, last], aspect="auto", cmap="Greys", interpolation="nearest")
axis.set(xlabel="unit of the last layer", yticks=range(6))
axis.set_yticklabels([task.name for task in tasks], fontsize=8)
plt.show()

# %% [markdown]
# If the network becomes full, hatrack warns you. A task that is no longer needed can be given up with
# `hat.release(task)`; what it alone used becomes free.
#
# ## 8. Save it and load it
#
# A method goes into one file. The file holds weights, gates and options, but no Python code, so you give `load` a
# trunk of the same shape.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    hr.save(hat, path)
    loaded = hr.load(path, new_network().trunk)

print("finished tasks:", list(loaded.history.values()))
assert torch.equal(loaded.eval()(images, task=0), hat.eval()(images, task=0))

# %% [markdown]
# ## What you have seen
#
# - Plain training forgets, because all tasks change the same trunk, and the gradient of one task knows nothing about
#   the others.
# - Forgetting is the best accuracy that a task had before the last one was learned, minus its accuracy in the end.
# - HAT gives each task gates, and freezes what finished tasks use. The old tasks then answer as before, bit for bit.
# - The price is capacity: every task takes some units for good.
#
# ## Exercises
#
# 1. Make the trunk much smaller (20 units per layer). What happens to the forgetting of plain training? What happens
#    to the last tasks of HAT, and what does `usage()` say?
# 2. `hr.HAT(net, c=0.0)` removes the term that asks for few open gates. How much capacity do six tasks take now?
# 3. Which task is forgotten most, and after which task does that happen? Is it always the task that resembles it
#    most, or the one that resembles it least? Plot the other columns with `plot_task`.
# 4. Replace `hr.HAT` by `hr.EWC`, `hr.ER` and `hr.Frozen`. Which of them forget? Which one learns the later tasks
#    worst, and why?
# 5. Train `hr.Method` with a smaller learning rate, `hr.Regime(epochs=6, optimizer="momentum", lr=0.005)`. Does it
#    forget less? Does it learn as well?
# 6. Run the same comparison with several seeds on the command line and look at the page it writes:
#
#    ```sh
#    hatrack run digits-and-clothes sgd --data sample --epochs 6 --optimizer momentum --widths 100,100 --seeds 0-2
#    hatrack run digits-and-clothes hat --data sample --epochs 6 --optimizer momentum --widths 100,100 --seeds 0-2
#    hatrack report runs
#    ```
#
# 7. Write a method of your own: the page "Adding a method" needs one file with one class.
