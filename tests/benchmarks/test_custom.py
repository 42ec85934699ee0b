"""The benchmark `own`: a user's tasks from a TOML file."""

import numpy as np
import pytest
import torch
from PIL import Image

from hatrack.__main__ import main
from hatrack.benchmarks.custom import own, resize_images
from hatrack.experiments.record import Record
from hatrack.experiments.run import Run


def write_gray(folder, name="digits.npz", size=8, **changes):
    """Write an .npz file with ten gray training images of two classes and four test images; return the arrays."""
    draw = np.random.RandomState(0)
    arrays = {
        "x_train": draw.randint(0, 256, (10, size, size), dtype=np.uint8),
        "y_train": np.arange(10, dtype=np.uint8) % 2,
        "x_test": draw.randint(0, 256, (4, size, size), dtype=np.uint8),
        "y_test": np.arange(4, dtype=np.uint8) % 2,
    }
    np.savez(folder / name, **{**arrays, **changes})
    return arrays


def write_images(folder, name="flowers", size=(12, 9)):
    """Write a folder of colour images with a sub-folder per class."""
    for part, count in (("train", 5), ("test", 2)):
        for colour, value in (("red", (200, 0, 0)), ("blue", (0, 0, 200)), ("black", (0, 0, 0))):
            path = folder / name / part / colour
            path.mkdir(parents=True)
            for k in range(count):
                Image.new("RGB", size, value).save(path / f"{k}.png")


def write_toml(folder, text):
    """Write tasks.toml and return its path."""
    path = folder / "tasks.toml"
    path.write_text(text)
    return str(path)


TWO = """
shape = [3, 16, 16]

[[task]]
name = "digits"
data = "digits.npz"

[[task]]
name = "flowers"
data = "flowers"
classes = 3
mean = 0.5
std = [0.25, 0.25, 0.5]
"""


def test_a_file_and_a_folder_become_two_tasks(tmp_path):
    write_gray(tmp_path)
    write_images(tmp_path)
    tasks = own(0, tasks=write_toml(tmp_path, TWO), valid=0.0)
    assert [(t.index, t.name, t.classes, t.shape) for t in tasks] == [
        (0, "digits", 2, (3, 16, 16)),
        (1, "flowers", 3, (3, 16, 16)),
    ]
    x = tasks[0].train.inputs(torch.arange(10))
    assert torch.equal(x[:, 0], x[:, 1]), "gray images fill all channels"
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3)), torch.ones(3), atol=1e-2, rtol=0)
    flowers = tasks[1].train
    black = flowers.inputs((flowers.y == 0).nonzero().flatten())  # classes are numbered in the order of their names
    torch.testing.assert_close(black[0, :, 0, 0], torch.tensor([-2.0, -2.0, -1.0]))


def test_it_runs_from_the_command_line(tmp_path, capsys):
    write_gray(tmp_path)
    write_images(tmp_path)
    file = write_toml(tmp_path, TWO)
    words = [
        "run",
        "own",
        "hat",
        "--tasks",
        file,
        "--widths",
        "10",
        "--epochs",
        "1",
        "--valid",
        "0.2",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(words) == 0
    (path,) = (tmp_path / "o").glob("*.json")
    assert [task.name for task in Record.load(path).tasks] == ["digits", "flowers"]


def test_the_first_task_may_have_a_single_image(tmp_path):
    lone = np.zeros((1, 8, 8), np.uint8)
    write_gray(tmp_path, x_train=lone, y_train=lone[:, 0, 0], x_test=lone, y_test=lone[:, 0, 0])
    file = write_toml(tmp_path, '[[task]]\nname = "one"\ndata = "digits.npz"\n')
    assert main(["run", "own", "hat", "--tasks", file, "--widths", "10", "--epochs", "1", "--out", str(tmp_path / "o")]) == 0


def test_other_data_is_another_run(tmp_path):
    """Under the same file name: a record of old data must not be taken for one of new data."""
    write_gray(tmp_path)
    file = write_toml(tmp_path, '[[task]]\nname = "d"\ndata = "digits.npz"\n')
    names = [Run("own", "sgd", benchmark_options={"tasks": file}).name]
    names.append(Run("own", "sgd", benchmark_options={"tasks": file}).name)
    write_gray(tmp_path, x_test=np.zeros((4, 8, 8), dtype=np.uint8))
    names.append(Run("own", "sgd", benchmark_options={"tasks": file}).name)
    assert names[0] == names[1] != names[2]


def test_one_shape_needs_no_shape_line(tmp_path):
    arrays = write_gray(tmp_path)
    (task,) = own(0, tasks=write_toml(tmp_path, '[[task]]\nname = "d"\ndata = "digits.npz"\nmean = 0\nstd = 1\n'), valid=0.0)
    assert task.shape == (1, 8, 8)
    torch.testing.assert_close(task.test.inputs(torch.arange(4))[:, 0], torch.from_numpy(arrays["x_test"]) / 255)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[task]\n", "not TOML"),
        ("", r"\[\[task\]\]"),
        ("colour = 1\n[[task]]\nname='a'\ndata='digits.npz'\n", "no key 'colour'"),
        ("[[task]]\nname='a'\ndata='digits.npz'\nclases=3\n", "task 1: no key 'clases'; did you mean 'classes'"),
        ("[[task]]\ndata='digits.npz'\n", "task 1: name is missing"),
        ("[[task]]\nname='a'\n", "task 1: data is missing"),
        ("[[task]]\nname='a'\ndata='digits.npz'\nclasses='two'\n", "classes must be a whole number from 1"),
        ("[[task]]\nname='a'\ndata='digits.npz'\nclasses=1\n", "label 1 is outside the 1 classes"),
        ("[[task]]\nname='a'\ndata='digits.npz'\nclasses=3\n", "class 2 of 3 has no example"),
        ("[[task]]\nname='a'\ndata='digits.npz'\nmean=0.5\n", "task 1: mean and std"),
        ("[[task]]\nname='a'\ndata='nothing.npz'\n", "nothing.npz"),
        ("shape=[3]\n[[task]]\nname='a'\ndata='digits.npz'\n", "shape must be a list of 3"),
        ("shape=[1,8,8]\n[[task]]\nname='f'\ndata='flowers'\n", "task 'f': .* 3 channels .* 1"),
        ("[[task]]\nname='a'\ndata='digits.npz'\n[[task]]\nname='f'\ndata='flowers'\n", r"a \(1, 8, 8\), f \(3, 9, 12\)"),
    ],
)  # fmt: skip
def test_errors_name_the_task_and_the_key(tmp_path, text, expected):
    write_gray(tmp_path)
    write_images(tmp_path)
    with pytest.raises((ValueError, OSError), match=expected) as error:
        own(0, tasks=write_toml(tmp_path, text))
    assert str(tmp_path / "tasks.toml") in str(error.value)


def test_a_missing_file(tmp_path, capsys):
    assert main(["run", "own", "hat", "--tasks", str(tmp_path / "no.toml")]) == 2
    assert str(tmp_path / "no.toml") in capsys.readouterr().err
    assert main(["run", "own", "hat"]) == 2
    assert "--tasks FILE.toml" in capsys.readouterr().err


def test_a_pickle_is_refused(tmp_path):
    write_gray(tmp_path, y_test=np.array([{"a": 1}] * 4, dtype=object))
    with pytest.raises(ValueError, match=r"digits\.npz"):
        own(0, tasks=write_toml(tmp_path, "[[task]]\nname='a'\ndata='digits.npz'\n"))


@pytest.mark.parametrize("most", [1, 200, 2**22])
def test_images_are_measured_and_resized_in_batches(tmp_path, monkeypatch, most):
    """So that a large set needs little more memory than its own; compared with numpy on all images at once."""
    monkeypatch.setitem(own.__globals__, "LARGEST", most)
    draw = np.random.RandomState(0)
    x = draw.randint(0, 256, (10, 3, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "colour.npz", x_train=x, y_train=np.arange(10) % 2, x_test=x[:4], y_test=np.arange(4) % 2)
    (task,) = own(0, tasks=write_toml(tmp_path, '[[task]]\nname="a"\ndata="colour.npz"\n'), valid=0.0)
    values = x.astype(np.float64) / 255
    np.testing.assert_allclose(task.train.transform.mean[0], values.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(task.train.transform.std[0], values.std((0, 2, 3), ddof=1), rtol=1e-6)
    small = resize_images(torch.from_numpy(x), (3, 4, 4))
    monkeypatch.undo()
    assert torch.equal(small, resize_images(torch.from_numpy(x), (3, 4, 4)))


def test_an_image_in_another_class_is_other_data(tmp_path):
    write_images(tmp_path)
    file = write_toml(tmp_path, '[[task]]\nname = "f"\ndata = "flowers"\n')
    before = Run("own", "sgd", benchmark_options={"tasks": file}).name
    (tmp_path / "flowers/train/blue/4.png").rename(tmp_path / "flowers/train/red/5.png")
    moved = Run("own", "sgd", benchmark_options={"tasks": file}).name
    (tmp_path / "flowers/train/notes.txt").write_text("not an image")
    assert before != moved == Run("own", "sgd", benchmark_options={"tasks": file}).name


def test_resizing_against_plain_averaging():
    """Halving an image with antialiasing: a constant image keeps its value, and others keep their mean."""
    x = torch.randint(0, 256, (3, 1, 16, 16), dtype=torch.uint8)
    x[0] = 77
    small = resize_images(x, (3, 8, 8))
    assert small.shape == (3, 3, 8, 8)
    assert small.dtype == torch.uint8
    assert (small[0] == 77).all()
    assert abs(small[1].float().mean() - x[1].float().mean()) < 4


@pytest.mark.parametrize(("mode", "kind", "suffix"), [("I;16", np.uint16, "png"), ("F", np.float32, "tif")])
def test_images_of_more_than_8_bits_are_refused(tmp_path, capsys, mode, kind, suffix):
    for number, name in enumerate("ab"):
        (tmp_path / "deep" / name).mkdir(parents=True)
        for k in range(4):
            values = np.full((16, 16), 300 + 20_000 * number + k, kind)
            Image.fromarray(values).save(tmp_path / "deep" / name / f"{k}.{suffix}")
    file = write_toml(tmp_path, '[[task]]\nname = "deep"\ndata = "deep"\n')
    assert main(["run", "own", "sgd", "--tasks", file, "--widths", "10", "--epochs", "1", "--out", str(tmp_path / "o")]) == 2
    assert "more than 8 bits per value" in capsys.readouterr().err


FLOATS = np.linspace(0, 255, 10 * 64, dtype=np.float32).reshape(10, 8, 8)


@pytest.mark.parametrize("scale", ["", "scale = 255\n"])
def test_floats_up_to_255_are_measured_in_their_own_units(tmp_path, scale):
    write_gray(tmp_path, x_train=FLOATS, x_test=FLOATS[:4])
    (task,) = own(0, tasks=write_toml(tmp_path, f'[[task]]\nname = "d"\ndata = "digits.npz"\n{scale}'), valid=0.0)
    seen = task.train.inputs(torch.arange(10))
    torch.testing.assert_close(seen.mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.std(), torch.tensor(1.0), atol=1e-4, rtol=0)


def test_floats_up_to_255_state_their_scale_if_mean_and_std_are_given(tmp_path):
    write_gray(tmp_path, x_train=FLOATS, x_test=FLOATS[:4])
    text = '[[task]]\nname = "d"\ndata = "digits.npz"\nmean = 0.5\nstd = 0.25\n'
    with pytest.raises(ValueError, match=r"tasks\.toml, task 'd': .*scale=255"):
        own(0, tasks=write_toml(tmp_path, text))
    (task,) = own(0, tasks=write_toml(tmp_path, text + "scale = 255\n"), valid=0.0)
    expected = (torch.from_numpy(FLOATS[:4]) / 255 - 0.5) / 0.25
    torch.testing.assert_close(task.test.inputs(torch.arange(4))[:, 0], expected)
    with pytest.raises(ValueError, match="scale must be a number"):
        own(0, tasks=write_toml(tmp_path, text + "scale = 0\n"))
