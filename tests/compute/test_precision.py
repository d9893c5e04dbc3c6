from __future__ import annotations

import pytest
import torch

from barter import Local
from barter.compute import precision
from barter.core.errors import ConfigError
from barter.experiment import Experiment
from barter.setup.hardware import resolve_precision


def test_the_cpu_computes_in_fp32() -> None:
    cpu = torch.device("cpu")
    assert resolve_precision("auto", cpu) == resolve_precision("fp32", cpu) == "fp32"
    for name in ("bf16", "tf32"):
        with pytest.raises(ConfigError, match=f"precision='{name}': on the cpu there is fp32 only"):
            Experiment(Local(), device="cpu", precision=name)
    with pytest.raises(ConfigError, match="precision='double'"):
        Experiment(Local(), device="cpu", precision="double")


def test_a_precision_holds_inside_and_no_longer() -> None:
    before = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        precision.current_precision(),
    )
    with precision.use_precision("tf32"):
        assert precision.current_precision() == "tf32"
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.deterministic
        with precision.use_precision("fp32"):
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    assert before == (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        precision.current_precision(),
    )


def test_autocast_is_for_bf16_on_cuda_only() -> None:
    with precision.use_precision("bf16"), precision.autocast(torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
