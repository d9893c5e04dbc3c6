from __future__ import annotations

import torch
from torch import nn

from barter.core.images import Spec
from barter.core.nodes import Server
from barter.ops.modules import copy_state, restore_module, stack_field


def test_a_module_is_as_it_was_remembered() -> None:
    server = Server(Spec(1, 1, 2, 2, (0.0,), (1.0,)), {}, None, torch.device("cpu"))
    new = nn.Linear(1, 1)
    before = new.weight.item()
    first = restore_module(server, "layer", new, {})
    assert first.weight.item() == before, "nothing to remember"
    remembered = copy_state(first)
    nn.init.constant_(first.weight, 7.0)
    assert remembered["weight"].item() == before, "training goes on, the copy stays"
    assert restore_module(server, "layer", nn.Linear(1, 1), remembered).weight.item() == before


def test_a_field_of_all_answers_is_stacked_in_their_order() -> None:
    answers = {k: {"counts": torch.tensor([k, 2 * k]), "other": k} for k in (3, 1)}
    assert stack_field(answers, "counts").tolist() == [[3, 6], [1, 2]]
