# SPDX-License-Identifier: Apache-2.0
"""The norm of a gradient and the update of weights, in an order that no mesh changes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from detjax.array_types import Array, Float32
from detjax.pallas_kernels.backend import Backend
from detjax.training.extras import optax

UPDATE_BLOCK = 2**14
"""Weights that are updated by one body of one shape, on a CPU."""

GPU_UPDATE_BLOCK = 2**22
"""The like on a GPU, where each body is a launch."""


def global_norm(gradients: Any) -> Float32[Array, ""]:
    """The norm of all tensors together.

    # ORDER: squares of a tensor as a perfect binary tree over its elements, zeros up to a power of
    # two; tensors left to right, by name.
    """
    total = jnp.float32(0)
    for tensor in jax.tree.leaves(gradients):
        squares = jnp.square(tensor.reshape(-1))
        squares = jnp.pad(squares, (0, (1 << (squares.size - 1).bit_length()) - squares.size))
        while squares.size > 1:
            squares = squares[0::2] + squares[1::2]
        total = total + squares[0]
    return jnp.sqrt(total)


MOST_ROUNDING = 2.0**-16
"""Of an update of one weight, beside others and without them. Vector widths change some roundings
of 2**-24 each; a norm over other weights changes the update itself."""


def why_not_elementwise(optimizer: optax.GradientTransformation) -> str | None:
    """How an optimizer's update of a weight depends on the other weights; None if it does not.

    It must keep no arrays of other shapes than the weights', and weights must have the same updates
    without their neighbours.
    """
    shapes = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((3, 5), jnp.float32))
    found = {leaf.shape for leaf in jax.tree.leaves(shapes)} - {(), (3, 5)}
    if found:
        return (
            f"the optimizer keeps arrays of shape {sorted(found)} for weights of shape (3, 5); "
            "give one that updates each weight by itself, such as adam, adamw or sgd"
        )
    weights = jnp.array([0.5, -2.0, 3.0, 0.25, -1.0], jnp.float32)
    # WHY two updates: Adam's first is the same whatever a gradient was scaled by.
    slopes = jnp.array([[1000.0, 1.0, 0.001, 2.0, -5.0], [0.5, 7.0, -2.0, 300.0, 1.0]], jnp.float32)

    def updates(part: slice) -> jax.Array:
        own = weights[part]
        state, found = optimizer.init(own), []
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for slope in slopes:
                update, state = optimizer.update(slope[part], state, own)
                found.append(update)
        return jnp.stack(found, axis=1)

    whole, parts = updates(slice(5)), [updates(slice(3)), updates(slice(3, 5))]
    if jnp.allclose(whole, jnp.concatenate(parts), rtol=MOST_ROUNDING, atol=0.0):
        return None
    return (
        "the optimizer's update of a weight depends on the other weights, as a norm over all of "
        "them does; give one that updates each weight by itself, such as adam, and clip with "
        "clip_norm"
    )


def update_in_blocks(
    optimizer: optax.GradientTransformation,
    gradient: Any,
    opt_state: Any,
    params: Any,
    *,
    backend: Backend,
) -> tuple[Any, Any]:
    """Apply an elementwise optimizer to all tensors as one row of blocks.

    # SHAPE: one body of one shape: how many weights a device holds chooses no vector width and no
    # fused multiply-add. On a CPU the compiler cannot see the bound either. On a GPU a hidden bound
    # would be read by the host before each block.

    Args:
        optimizer: Elementwise.
        gradient: Of `params`.
        opt_state: Numbers, and trees like `params`.
        params: This device's share.
        backend: Chooses the size of a block.

    Returns:
        The new state of the optimizer and the new parameters.
    """
    structure, is_on_cpu = jax.tree.structure(params), backend.platform == "cpu"
    block = UPDATE_BLOCK if is_on_cpu else GPU_UPDATE_BLOCK
    is_like = lambda node: jax.tree.structure(node) == structure  # noqa: E731
    parts, whole_state = jax.tree.flatten(opt_state, is_leaf=is_like)
    like = [is_like(part) for part in parts]
    shape = jax.ShapeDtypeStruct((block,), jnp.float32)
    state_of_block = jax.tree.structure(jax.eval_shape(optimizer.init, shape))

    def run(i, carried):
        done, _ = carried
        own = [
            lax.dynamic_index_in_dim(x, i, keepdims=False) for x in (blocks if is_on_cpu else done)
        ]
        slots, numbers = iter(own[1:]), iter(scalars)
        state = [next(slots) if is_block else next(numbers) for is_block in like]
        of_block = lax.dynamic_index_in_dim(slopes, i, keepdims=False)
        # WHY: optax 0.2.8 relies on implicit promotion, which detjax's tests forbid.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            state = jax.tree.unflatten(state_of_block, state)
            updates, state = optimizer.update(of_block, state, own[0])
            new = [optax.apply_updates(own[0], updates)]
        found = jax.tree.leaves(state)
        new += [x for x, is_block in zip(found, like, strict=True) if is_block]
        rest = [x for x, is_block in zip(found, like, strict=True) if not is_block]
        put = lax.dynamic_update_index_in_dim
        return [put(x, part, i, 0) for x, part in zip(done, new, strict=True)], rest

    scalars = [part for part, is_block in zip(parts, like, strict=True) if not is_block]
    slots = [part for part, is_block in zip(parts, like, strict=True) if is_block]
    slopes = _in_blocks(gradient, block)
    blocks = [_in_blocks(tree, block) for tree in (params, *slots)]
    bound = lax.optimization_barrier(jnp.int32(len(slopes))) if is_on_cpu else len(slopes)
    # WHY: XLA:CPU (jax 0.11.2) copied whole arrays in each turn where one fusion wrote what another
    # read, so the time grew with the square of the number of weights. XLA:GPU writes in place.
    done = list(map(jnp.zeros_like, blocks)) if is_on_cpu else blocks
    done, scalars = lax.fori_loop(0, bound, run, (done, scalars))
    params, *slots = (_from_blocks(x, params) for x in done)
    left, numbers = iter(slots), iter(scalars)
    parts = [next(left) if is_block else next(numbers) for is_block in like]
    return jax.tree.unflatten(whole_state, parts), params


def _in_blocks(tree: Any, block: int) -> Float32[Array, "X Y"]:
    """All elements, one tensor after the other, and zeros up to whole blocks, two at least.

    # SHAPE: of one block the compiler knows the index, and takes the body out of its loop: Adam of
    # one block had other bits than of two (XLA:CPU, jax 0.11.2).
    """
    parts = [x.reshape(-1) for x in jax.tree.leaves(tree)]
    size = sum(part.size for part in parts)
    rest = max(-(-size // block), 2) * block - size
    return jnp.concatenate([*parts, jnp.zeros(rest, jnp.float32)]).reshape(-1, block)


def _from_blocks(blocks: jax.Array, like: Any) -> Any:
    """The inverse of `_in_blocks`."""
    leaves, structure = jax.tree.flatten(like)
    flat, start, out = blocks.reshape(-1), 0, []
    for leaf in leaves:
        out.append(flat[start : start + leaf.size].reshape(leaf.shape))
        start += leaf.size
    return jax.tree.unflatten(structure, out)
