# SPDX-License-Identifier: Apache-2.0
"""One jitted step over the donated cache: prefill and decode are two shapes of it."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.models.decoder import forward, last_hidden, local_logits
from detjax.models.layers import Recipe, Tokens
from detjax.models.loading import LoadedModel
from detjax.parallel.mesh import DP_AXIS, TP_AXIS
from detjax.serving.sampling import Choice, SamplingRows, choose

PAGES_SPEC = P(None, DP_AXIS, None, TP_AXIS, None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What a compiled step is specialised to. None of it can change a bit."""

    batch: int
    length: int
    table_len: int
    num_pages: int
    num_top: int
    with_filters: bool


def pages_shape(model: LoadedModel, num_pages: int) -> jax.ShapeDtypeStruct:
    """Shape of the cache with `num_pages` pages over all replicas, and its sharding."""
    config, profile = model.config, model.profile
    shape = (
        config.num_layers,
        num_pages,
        2,
        model.num_kv_slots,
        profile.attention_block,
        config.head_dim,
    )
    sharding = NamedSharding(model.mesh, PAGES_SPEC)
    return jax.ShapeDtypeStruct(shape, profile.activation_dtype, sharding=sharding)


def empty_pages(model: LoadedModel, num_pages: int) -> Activation[Array, "L N 2 K P C"]:
    """Allocate the cache, each shard on its device."""
    shape = pages_shape(model, num_pages)
    make = jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=shape.sharding)
    return make()


def step_function(model: LoadedModel, *, num_top: int, with_filters: bool) -> Callable:
    """The step as a function of whole arrays, ready for `jax.jit` with the pages donated."""
    recipe = Recipe(
        config=model.config,
        profile=model.profile,
        backend=model.backend,
        tp=model.mesh.shape[TP_AXIS],
    )

    def local_step(
        params: dict,
        rope_tables: tuple[Float32[Array, "S half"], Float32[Array, "S half"]],
        pages: Activation[Array, "L N 2 K P C"],
        tokens: Tokens,
        rows: SamplingRows,
    ) -> tuple[Activation[Array, "L N 2 K P C"], Choice]:
        pages, hidden = forward(recipe, params, rope_tables, pages, tokens)
        last: Int32[Array, " B"] = jnp.argmax(tokens.positions, axis=1).astype(jnp.int32)
        positions = jnp.max(tokens.positions, axis=1) + 1
        logits = local_logits(recipe, params, last_hidden(hidden, last))
        choice = choose(recipe, logits, rows, positions, num_top=num_top, with_filters=with_filters)
        return pages, choice

    by_row = P(DP_AXIS)
    return jax.shard_map(
        local_step,
        mesh=model.mesh,
        in_specs=(model.partition_specs, P(), PAGES_SPEC, by_row, by_row),
        out_specs=(PAGES_SPEC, by_row),
        check_vma=False,
    )


def compile_step(model: LoadedModel, shape: StepShape) -> Callable:
    """Compile the step for one shape; the pages are donated and updated in place."""
    by_row = NamedSharding(model.mesh, P(DP_AXIS))

    def rows(dtype, *tail):
        return jax.ShapeDtypeStruct((shape.batch, *tail), dtype, sharding=by_row)

    tokens = Tokens(
        ids=rows(jnp.int32, shape.length),
        positions=rows(jnp.int32, shape.length),
        page_table=rows(jnp.int32, shape.table_len),
    )
    sampling = SamplingRows(
        temperature=rows(jnp.float32),
        top_k=rows(jnp.int32),
        top_p=rows(jnp.float32),
        min_p=rows(jnp.float32),
        seed_low=rows(jnp.uint32),
        seed_high=rows(jnp.uint32),
        sample_idx=rows(jnp.uint32),
    )
    step = step_function(model, num_top=shape.num_top, with_filters=shape.with_filters)
    lowered = jax.jit(step, donate_argnums=2).lower(
        model.params, model.rope_tables, pages_shape(model, shape.num_pages), tokens, sampling
    )
    return lowered.compile()
