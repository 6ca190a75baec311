# SPDX-License-Identifier: Apache-2.0
"""The exchange kernels of Hopper, as `exchange.ExchangeKernel` names them."""

from detjax.pallas_kernels.linear.sm90 import normalises_input
from detjax.parallel.sm90_choice_exchange import (
    choice_words,
    exchange_choose_token,
    takes_vocabulary,
)
from detjax.parallel.sm90_exchange import exchange_add_rms_norm, slot_words, takes_width
from detjax.parallel.sm90_slots import EMPTY
from detjax.parallel.sm90_tile_exchange import (
    TILE_WORDS,
    adds_tiles,
    linear_exchange_add,
    num_tiles,
)

__all__ = [
    "EMPTY",
    "TILE_WORDS",
    "adds_tiles",
    "choice_words",
    "exchange_add_rms_norm",
    "exchange_choose_token",
    "linear_exchange_add",
    "normalises_input",
    "num_tiles",
    "slot_words",
    "takes_vocabulary",
    "takes_width",
]
