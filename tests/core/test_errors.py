"""Errors are told apart by what they mean."""

from __future__ import annotations

import pytest
import torch

from barter.core.errors import is_out_of_memory


def test_an_error_about_memory_locations_is_no_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="memory") as caught:
        torch.zeros(1).expand(3).add_(1)
    assert not is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))


def test_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
