"""Loading Megatron's DistributedOptimizer where its inner optimizer is torch's Adam.

Without Transformer Engine or apex, Megatron-Core 0.19 keeps Adam's `step` as a tensor in the state
of each parameter, saves it in the parameter groups, and then misses it among the loaded tensors
(KeyError: 'step'). Here a tensor that was not loaded keeps its value, which `load_state_dict` has
already set from the parameter groups. And Megatron gives all parameters one and the same `step`
tensor when it loads, which torch's Adam would then count up once per parameter.

It cannot save before the first update either, as torch's Adam makes its state only then; here the
state is there from the start, all zeros, which is what torch would begin with.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer


def allow_loading(optimizer: DistributedOptimizer) -> None:
    """Make `optimizer` save at any time and load what it saved; a fused Adam does so anyway."""
    if HAVE_APEX_OR_TE:
        return
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_all_but_step(parameter: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        set_states(parameter, {"step": None, **tensors})

    load = optimizer.load_state_dict

    def load_with_a_step_each(state_dict: dict[str, Any]) -> None:
        load(state_dict)
        for state in optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()

    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                **{key: torch.zeros_like(parameter) for key in optimizer.optimizer_state_keys},
            }
    optimizer._set_main_param_and_optimizer_states = set_all_but_step
    optimizer.load_state_dict = load_with_a_step_each
