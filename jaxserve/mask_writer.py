"""What constrained sequences may draw next, as bits in their slots, just before they draw."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from functools import cached_property

import jax
import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par

from jaxserve.batch import DeviceState, LogitRules

MAX_THREADS = 16


class MaskWriter:
    """Asks matchers what they allow, several at a time."""

    def __init__(self, state: DeviceState) -> None:
        """Writes into states like this one."""
        self._shape = state.rules.allowed.shape

    @cached_property
    def _threads(self) -> LLExecutor:
        return LLExecutor(min(os.cpu_count() or 1, MAX_THREADS))

    def write(self, state: DeviceState, constrained: Seq[tuple[int, LLMatcher]]) -> DeviceState:
        """The state with the masks of these slots; those of others are lost. Consumes `state`.

        A matcher that has failed allows the end of the answer only, and refuses it when it comes.
        """
        if not constrained:
            return state
        # A new array each time: the device may use it where it is.
        masks: np.ndarray = np.zeros(self._shape, np.int32)
        fill_next_token_bitmask_par(
            self._threads, [(matcher, slot) for slot, matcher in constrained], masks
        )
        allowed = jax.device_put(masks.view(np.uint32))
        rules = LogitRules(**(vars(state.rules) | {"allowed": allowed}))
        return DeviceState(state.layers, state.last_token, rules)
