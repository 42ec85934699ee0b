"""The precision of products on a GPU: torch's flags, which a machine without one has as well."""

from typing import Any

import pytest
import torch

from hatrack.engine.precision import precision_scope
from hatrack.methods import certificate

GPU = torch.device("cuda")
FLAGS: Any = torch.backends
PARTS = [FLAGS.cuda.matmul, FLAGS.cudnn.conv, FLAGS.cudnn.rnn]


def precisions():
    return [part.fp32_precision for part in PARTS]


@pytest.fixture
def flags_of_torch():
    """What torch's flags are before the test, they are after it."""
    before, everywhere = precisions(), FLAGS.fp32_precision
    yield
    FLAGS.fp32_precision = everywhere
    FLAGS.cuda.matmul.allow_tf32, FLAGS.cudnn.allow_tf32 = False, True
    for part, precision in zip(PARTS, before, strict=True):
        part.fp32_precision = precision


@pytest.mark.parametrize("where", [FLAGS, *PARTS], ids=["everywhere", "products", "convolutions", "recurrent"])
@pytest.mark.parametrize("user", ["tf32", "ieee"])
@pytest.mark.parametrize("precision", ["tf32", "float32"])
def test_a_user_s_own_flags_neither_decide_nor_are_lost(precision, user, where, flags_of_torch):
    """They may be set by torch's new names, with which reading the old ones is an error."""
    where.fp32_precision = user
    before, kind = precisions(), "tf32" if precision == "tf32" else "ieee"
    with precision_scope(precision, GPU):
        assert precisions() == [kind] * 3
        assert FLAGS.cuda.matmul.allow_tf32 == FLAGS.cudnn.allow_tf32 == (precision == "tf32")
    assert precisions() == before


def test_a_certificate_says_what_a_user_s_own_flags_are(monkeypatch, flags_of_torch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    FLAGS.cuda.matmul.fp32_precision, FLAGS.cudnn.conv.fp32_precision = "tf32", "ieee"
    assert certificate._conditions(GPU)["tf32"] == "True False"
