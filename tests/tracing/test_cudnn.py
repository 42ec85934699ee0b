"""cuDNN is switched off and on again, also by several threads."""

import threading

import torch

from hatrack.tracing.cudnn import without_cudnn


def test_the_last_block_restores_it():
    before = torch.backends.cudnn.enabled
    with without_cudnn():
        assert not torch.backends.cudnn.enabled
        with without_cudnn():
            assert not torch.backends.cudnn.enabled
        assert not torch.backends.cudnn.enabled
    assert torch.backends.cudnn.enabled == before


def test_blocks_of_several_threads():
    """The first one ends while the second is active; then a plain save and restore would leave it off."""
    before, entered, leave = torch.backends.cudnn.enabled, threading.Event(), threading.Event()

    def second():
        with without_cudnn():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=second)
    with without_cudnn():
        thread.start()
        assert entered.wait(10)
    assert not torch.backends.cudnn.enabled
    leave.set()
    thread.join()
    assert torch.backends.cudnn.enabled == before
