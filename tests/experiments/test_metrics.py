"""Every measure on matrices worked out by hand. Row t: after learning task t; column i: on task i."""

import math

import numpy as np
import pytest

from hatrack.experiments import metrics

A = [
    [0.90, 0.30, 0.20],
    [0.60, 0.80, 0.40],
    [0.50, 0.70, 1.00],
]


def close(value):
    return pytest.approx(value, abs=1e-12)


def test_average_accuracy():
    # (0.50 + 0.70 + 1.00) / 3 = 2.20 / 3
    assert metrics.average_accuracy(A) == close(2.20 / 3)


def test_average_accuracies_after_every_task():
    # 0.90; (0.60 + 0.80) / 2 = 0.70; (0.50 + 0.70 + 1.00) / 3
    assert metrics.average_accuracies(A).tolist() == close([0.90, 0.70, 2.20 / 3])


def test_learning_accuracy():
    # (0.90 + 0.80 + 1.00) / 3 = 0.90
    assert metrics.learning_accuracy(A) == close(0.90)


def test_forgetting():
    # task 0: max(0.90, 0.60) - 0.50 = 0.40; task 1: max(0.30, 0.80) - 0.70 = 0.10; the last task does not count
    assert metrics.forgetting(A) == close(0.25)


def test_forgetting_takes_the_best_before_the_end_not_the_diagonal():
    # task 0: its best, 0.80, comes after task 1: 0.80 - 0.60 = 0.20; task 1: max(0.30, 0.70) - 0.90 = -0.20: it got better
    a = [[0.70, 0.30, 0.0], [0.80, 0.70, 0.0], [0.60, 0.90, 1.0]]
    assert metrics.forgetting(a) == close(0.0)
    # two tasks: task 0 rose from 0.5 to 0.7, which counts as negative forgetting
    assert metrics.forgetting([[0.5, 0.1], [0.7, 0.9]]) == close(-0.2)


def test_a_peak_before_the_task_was_learned():
    # task 1: 0.6 - 0.5 = 0.1, or max(0.9, 0.6) - 0.5 = 0.4 by Mirzadeh et al.; task 0: max(0.8, 0.8) - 0.8 = 0
    a = [[0.8, 0.9, 0.0], [0.8, 0.6, 0.0], [0.8, 0.5, 0.7]]
    assert metrics.forgetting(a) == close(0.05)
    assert metrics.forgetting_mirzadeh(a) == close(0.2)


def test_forgetting_of_an_exact_method_is_exactly_zero():
    # By chance task 1 had 0.7 before it was learned, and then 0.6 for good.
    a = [[0.1 + 0.2, 0.7, 0.1], [0.1 + 0.2, 0.6, 0.9], [0.1 + 0.2, 0.6, 0.3]]
    assert metrics.forgetting(a) == 0.0
    assert metrics.forgetting_mirzadeh(a) == close(0.05)


def test_forgetting_against_plain_loops():
    source = np.random.default_rng(0)
    for tasks in range(2, 7):
        a = source.random((tasks, tasks))
        last, ours, theirs = tasks - 1, 0.0, 0.0
        for i in range(last):
            ours += max(a[t][i] - a[last][i] for t in range(i, last)) / last
            theirs += max(a[t][i] - a[last][i] for t in range(last)) / last
        assert metrics.forgetting(a) == close(ours)
        assert metrics.forgetting_mirzadeh(a) == close(theirs)


def test_intransigence():
    # (0.95 - 0.90) + (0.85 - 0.80) + (0.90 - 1.00) = 0
    alone = [[0.95, 0, 0], [0, 0.85, 0], [0, 0, 0.90]]
    assert metrics.intransigence(A, alone) == close(0.0)
    assert metrics.intransigence(A, np.ones((3, 3))) == close((0.1 + 0.2 + 0.0) / 3)
    with pytest.raises(ValueError, match=r"3 and 1"):
        metrics.intransigence(A, [[0.9]])


def test_backward_transfer():
    # task 0: 0.50 - 0.90 = -0.40; task 1: 0.70 - 0.80 = -0.10
    assert metrics.backward_transfer(A) == close(-0.25)


def test_forward_transfer():
    # task 1 after task 0: 0.30 - 0.25 = 0.05; task 2 after task 1: 0.40 - 0.10 = 0.30; before[0] does not count
    assert metrics.forward_transfer(A, [0.99, 0.25, 0.10]) == close(0.175)


def test_loss_forgetting():
    # task 0: 2.0 - 0.1 = 1.9; task 1: 0.5 - 0.2 = 0.3
    assert metrics.loss_forgetting([[0.1, 3.0, 3.0], [1.0, 0.2, 3.0], [2.0, 0.5, 0.4]]) == close(1.1)


def test_forgetting_ratios():
    joint = [[0.90, 0, 0], [0.85, 0.90, 0], [0.80, 0.90, 0.95]]
    random = np.diag([0.10, 0.20, 0.50])
    # t=0: (0.90 - 0.10) / (0.90 - 0.10) - 1 = 0
    # t=1: task 0: (0.60 - 0.10) / (0.85 - 0.10) - 1 = 0.50 / 0.75 - 1 = -1/3
    #      task 1: (0.80 - 0.20) / (0.90 - 0.20) - 1 = 0.60 / 0.70 - 1 = -1/7     mean: -(1/3 + 1/7) / 2 = -5/21
    # t=2: task 0: 0.40 / 0.70 - 1 = -3/7; task 1: 0.50 / 0.70 - 1 = -2/7; task 2: 0.50 / 0.45 - 1 = 1/9
    #      mean: (-5/7 + 1/9) / 3 = (-45 + 7) / 63 / 3 = -38/189
    assert metrics.forgetting_ratios(A, joint, random).tolist() == close([0, -5 / 21, -38 / 189])


def test_forgetting_ratio_of_the_references_themselves():
    joint = np.array([[0.9, 0.1], [0.8, 0.7]])
    random = np.array([[0.1, 0.1], [0.1, 0.3]])
    assert metrics.forgetting_ratios(joint, joint, random).tolist() == close([0, 0])
    guessing = np.array([[0.1, 0.0], [0.1, 0.3]])
    assert metrics.forgetting_ratios(guessing, joint, random).tolist() == close([-1, -1])


def test_forgetting_ratios_use_only_the_diagonal_of_random():
    joint, random = np.full((2, 2), 0.9), np.array([[0.1, 0.77], [0.66, 0.2]])
    # t=1: (0.5 - 0.1) / 0.8 - 1 = -0.5; (0.9 - 0.2) / 0.7 - 1 = 0     mean -0.25
    assert metrics.forgetting_ratios([[0.9, 0], [0.5, 0.9]], joint, random).tolist() == close([0, -0.25])


def test_in_a_growing_head_guessing_gets_harder_with_every_task():
    joint, random = np.full((2, 2), 0.9), np.array([[0.5, 0.0], [0.25, 0.3]])
    # t=1: (0.25 - 0.25) / 0.65 - 1 = -1; (0.6 - 0.3) / 0.6 - 1 = -0.5     mean -0.75
    found = metrics.forgetting_ratios([[0.5, 0], [0.25, 0.6]], joint, random, growing=True)
    assert found.tolist() == close([-1, -0.75])
    assert metrics.forgetting_ratios(random, joint, random, growing=True).tolist() == close([-1, -1])


def test_forgetting_ratio_is_not_finite_where_joint_is_no_better_than_guessing():
    ratios = metrics.forgetting_ratios([[0.5, 0], [0.9, 0.9]], [[0.1, 0], [0.9, 0.9]], np.diag([0.1, 0.1]))
    assert not math.isfinite(ratios[0])  # (0.5 - 0.1) / 0
    assert ratios[1] == close(0)


def test_one_task():
    one = [[0.8]]
    assert metrics.average_accuracy(one) == close(0.8)
    assert metrics.average_accuracies(one).tolist() == close([0.8])
    assert metrics.learning_accuracy(one) == close(0.8)
    assert metrics.forgetting(one) == 0
    assert metrics.forgetting_mirzadeh(one) == 0
    assert metrics.backward_transfer(one) == 0
    assert metrics.loss_forgetting(one) == 0
    assert metrics.forward_transfer(one, [0.1]) == 0
    # (0.8 - 0.2) / (1.0 - 0.2) - 1 = -0.25
    assert metrics.forgetting_ratios(one, [[1.0]], [[0.2]]).tolist() == close([-0.25])


def test_nothing_is_measured_of_tasks_not_yet_learned():
    upper = np.array(A)
    upper[np.triu_indices(3, 1)] = np.nan
    assert metrics.average_accuracy(upper) == metrics.average_accuracy(A)
    assert metrics.learning_accuracy(upper) == metrics.learning_accuracy(A)
    assert metrics.backward_transfer(upper) == metrics.backward_transfer(A)
    assert metrics.average_accuracies(upper).tolist() == metrics.average_accuracies(A).tolist()
    assert np.isfinite(metrics.forgetting_ratios(upper, np.ones((3, 3)), np.zeros((3, 3)))).all()


@pytest.mark.parametrize("bad", [[0.5, 0.6], [[0.5, 0.6]], [[[0.5]]], 0.5, [], np.zeros((0, 0))])
def test_a_matrix_must_be_square(bad):
    measures = [metrics.average_accuracy, metrics.learning_accuracy, metrics.forgetting, metrics.backward_transfer]
    for measure in [*measures, metrics.loss_forgetting, metrics.average_accuracies, metrics.forgetting_mirzadeh]:
        with pytest.raises(ValueError, match="T x T"):
            measure(bad)


@pytest.mark.parametrize(("joint", "random"), [([[0.9]], np.zeros((3, 3))), (np.ones((3, 3)), [[0.1]])])
def test_references_of_another_size_are_refused(joint, random):
    with pytest.raises(ValueError, match=r"3.*1|1.*3"):
        metrics.forgetting_ratios(A, joint, random)


@pytest.mark.parametrize("before", [[0.1], [0.1, 0.2], [0.1, 0.2, 0.3, 0.4]])
def test_forward_transfer_needs_one_value_per_task(before):
    with pytest.raises(ValueError, match=rf"(?=.*\b3\b)(?=.*\b{len(before)}\b)"):
        metrics.forward_transfer(A, before)


def test_two_tasks_are_enough_for_transfer_and_forgetting():
    accuracy = [[0.9, 0.3], [0.6, 0.8]]
    assert metrics.forward_transfer(accuracy, [0.1, 0.25]) == pytest.approx(0.3 - 0.25)
    assert metrics.backward_transfer(accuracy) == pytest.approx(0.6 - 0.9)
    assert metrics.loss_forgetting(accuracy) == pytest.approx(0.6 - 0.9)


def test_forgetting_takes_the_best_of_every_task_over_time():
    accuracy = [[0.9, 0.95, 0.1], [0.5, 0.8, 0.1], [0.4, 0.6, 0.7]]
    assert metrics.forgetting(accuracy) == pytest.approx(((0.9 - 0.4) + (0.8 - 0.6)) / 2)
    assert metrics.forgetting_mirzadeh(accuracy) == pytest.approx(((0.9 - 0.4) + (0.95 - 0.6)) / 2)
