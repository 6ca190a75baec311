# SPDX-License-Identifier: Apache-2.0
"""The kernels that a program runs for an operation, read from the traced program."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from detjax.diverge.recorder import Tap, TappedPrograms
from detjax.engine.running.program_key import ProgramKey
from detjax.models.loading import LoadedModel
from detjax.models.params import TENSORS_OF
from detjax.numerics import tree_reduction
from detjax.pallas_kernels.delta_rule.sizes import states_of_page
from detjax.pallas_kernels.reference_library import PREFIX
from detjax.parallel.mesh import TP_AXIS

_SHOWN = frozenset(
    {
        "all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter",
        "dot_general", "reduce_sum", "sort", "top_k",
    }
)  # fmt: skip
"""Primitives outside kernels that move between ranks, or whose order of work decides bits."""

_PART_OF = {
    "q": "qkv", "k": "qkv", "v": "qkv", "cached_k": "attention", "cached_v": "attention",
    **dict.fromkeys(TENSORS_OF["linear_in"], "linear_in"),
}  # fmt: skip


def kernels_of(
    programs: TappedPrograms, key: ProgramKey, tap: Tap, params: dict, *, after: Tap | None
) -> tuple[str, ...]:
    """Return the kernels between an earlier result and an operation's result, in order.

    Args:
        programs: That ran it.
        key: Which of them; for a launch of several tokens, the program of each token is read.
        tap: The operation.
        params: Of the model.
        after: The earlier result; None is the beginning.
    """
    if key.kind == "decode" and key.length > 1:
        key = dataclasses.replace(key, length=1)
    traced = jax.make_jaxpr(programs.function(key))(*programs.operands(key, params))
    (body,) = (eqn.params["jaxpr"] for eqn in traced.eqns if eqn.primitive.name == "shard_map")
    names = programs.order_of_results(key)
    makers = {id(variable): i for i, eqn in enumerate(body.eqns) for variable in eqn.outvars}
    results = body.outvars[-len(names) :]
    made_at = {
        name: makers.get(id(variable), -1) for name, variable in zip(names, results, strict=True)
    }
    if _made_with(tap) not in made_at:  # of a choice program behind it
        return ()
    end = made_at[_made_with(tap)]
    begin = -1 if after is None else made_at[_made_with(after)]
    if begin >= end:  # both are of one kernel
        begin = max((at for at in made_at.values() if at < end), default=-1)
    return tuple(line for eqn in body.eqns[begin + 1 : end + 1] for line in _kernels(eqn))


def _made_with(tap: Tap) -> Tap:
    """The tap of the program that a canonical value is a part of."""
    return Tap(tap.layer, _PART_OF.get(tap.name, tap.name))


def order_of(tap: Tap, model: LoadedModel) -> str:
    """Return what the numerics profile fixes of an operation's sums; empty if nothing."""
    profile, config, tp = model.profile, model.config, model.mesh.shape[TP_AXIS]
    sizes = config.linear_attention
    is_linear = tap.layer is not None and config.is_linear(tap.layer)
    if tap.name == "attention" and is_linear:
        block = profile.attention_block // states_of_page(profile.attention_block)
        return f"a grid of {block} tokens, and in order the rows behind its last point"
    if tap.name == "attention":
        return f"blocks of {profile.attention_block} keys, splits of {profile.attention_split}"
    if tap.name == "down_residual" and tap.layer is not None and config.has_experts(tap.layer):
        return "a row's experts in order of rank, one fused multiply-add each"
    if tap.name.startswith(("o_", "down_")):
        is_o = tap.name.startswith("o_")
        width = config.num_heads * config.head_dim if is_o else config.intermediate_size
        if is_o and is_linear and sizes is not None:
            width = sizes.num_value_heads * sizes.value_dim
        leaves = tree_reduction(width, profile)
        return f"a tree of {leaves.num_leaves} leaves of {leaves.leaf_len} over {tp} ranks"
    if tap.name in ("log_sum_exp", "logprob"):
        return f"blocks of {profile.vocab_block} logits"
    return ""


def _kernels(eqn: Any) -> Iterator[str]:
    name = eqn.primitive.name
    if name == "pallas_call":
        yield f"{eqn.params['name']} -> {_shapes(eqn)}"
        return
    if name == "core_map":
        yield f"{eqn.params['name']} -> {_shapes(eqn)}"
        return
    if name in _SHOWN or name.startswith(PREFIX):
        yield f"{name} -> {_shapes(eqn)}"
        return
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = item.jaxpr if isinstance(item, core.ClosedJaxpr) else item
            if isinstance(inner, core.Jaxpr):
                for sub in inner.eqns:
                    yield from _kernels(sub)


def _shapes(eqn: Any) -> str:
    return ", ".join(variable.aval.str_short() for variable in eqn.outvars)
