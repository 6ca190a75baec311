# SPDX-License-Identifier: Apache-2.0
"""A model as shapes alone: to learn what a backend refuses, or to compile, before any weight."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.compilation.kept_executables import find_or_ask
from detjax.models.config import ModelConfig
from detjax.models.decoder import forward, local_logits
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.pages import cache_of
from detjax.models.params import ParamSpec, kv_layout, param_specs, partition_specs
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.hopper_sums import LOGIT_BLOCK
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.parallel.exchange import modules_of
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

PROBED_LENGTHS = (1, 100, 200, 1000)
"""Rows of steps. Between 128 and 256 rows a kernel of its own finishes sums (`sm90.linear_add`)."""


def abstract_params(
    config: ModelConfig, mesh: Mesh | AbstractMesh, *, profile: NumericsProfile
) -> dict:
    """Shapes, dtypes and shardings of a loaded model's parameters."""
    tp = mesh.shape[TP_AXIS]

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec.partition)
        dtype = spec.tensors[0].dtype(profile.param_dtype)
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    return jax.tree.map(shape, param_specs(config, tp=tp, vocab_block=profile.vocab_block))


def why_unsupported(
    config: ModelConfig, profile: NumericsProfile, backend: Backend, tp: int
) -> str | None:
    """What a backend's kernels refuse in this model, or None if they take it.

    The step is traced, not run: the kernels check their own limits, so this cannot fall behind
    them. Asked again of the same, also in a later process that keeps programs where this one does,
    the first answer is given.
    """
    if KERNELS[backend].takes_every_model:
        return None
    if profile.vocab_block != LOGIT_BLOCK:  # the choice of a token is no part of the step
        return f"its kernels sum blocks of {LOGIT_BLOCK} logits, not {profile.vocab_block}"
    return _why_not_here(config, profile, backend, tp, KERNELS[backend])


def why_weights_unsupported(
    config: ModelConfig,
    profile: NumericsProfile,
    backend: Backend,
    tp: int,
    *,
    params: dict,
    specs: dict,
) -> str | None:
    """`why_unsupported` of weights as they lie on the devices, of whichever form.

    Args:
        config: The model.
        profile: The numerics to run with.
        backend: Whose kernels.
        tp: Ranks.
        params: Its weights.
        specs: How they are split.
    """
    if KERNELS[backend].takes_every_model:
        return None
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return find_or_ask(
        lambda: _why_not_traced(config, profile, backend, tp, params, specs),
        root=(__name__, *modules_of(backend)),
        asked_of=(config, profile, backend, tp, KERNELS[backend], repr(params)),
    )


@functools.cache
def _why_not_here(
    config: ModelConfig, profile: NumericsProfile, backend: Backend, tp: int, kernels: object
) -> str | None:
    return find_or_ask(
        lambda: _why_not_traced(config, profile, backend, tp),
        root=(__name__, *modules_of(backend)),
        asked_of=(config, profile, backend, tp, kernels),  # another set is another question
    )


def _why_not_traced(
    config: ModelConfig,
    profile: NumericsProfile,
    backend: Backend,
    tp: int,
    params: dict | None = None,
    specs: dict | None = None,
) -> str | None:
    """Trace one layer of each kind, with `params` of `specs` or as the configuration has them."""
    layers = params["layers"] if params else [None] * config.num_layers
    kinds = {
        (config.sliding_windows[i], config.has_experts(i), config.is_linear(i), repr(layers[i])): i
        for i in range(config.num_layers)
    }
    config = config.with_layers(list(kinds.values()))
    if params is not None and specs is not None:
        params, specs = (
            tree | {"layers": [tree["layers"][i] for i in kinds.values()]}
            for tree in (params, specs)
        )
    mesh = AbstractMesh((1, tp), (DP_AXIS, TP_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))
    ctx = ForwardContext(config=config, profile=profile, backend=backend, tp=tp)
    num_slots = kv_layout(config.num_heads, config.num_kv_heads, tp).num_slots
    if params is None:
        params = abstract_params(config, mesh, profile=profile)
        specs = partition_specs(config, tp=tp, vocab_block=profile.vocab_block)

    def logits(params, tables, pages, tokens):
        _, hidden = forward(ctx, params, tables, pages, tokens)
        return local_logits(ctx, params, hidden.reshape(-1, config.hidden_size))

    pages_spec = P(None, None, None, TP_AXIS)
    traced = jax.shard_map(
        logits,
        mesh=mesh,
        in_specs=(specs, P(), pages_spec, P()),
        out_specs=P(None, TP_AXIS),
        check_vma=False,
    )
    table = jax.ShapeDtypeStruct((1024, len(config.ropes) * config.head_dim // 2), jnp.float32)

    def shape(
        num_layers: int, *page: int, dtype: jnp.dtype, is_local: bool = False
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_layers, 8, *page), dtype)

    pages = cache_of(config, profile, num_kv_slots=num_slots, make=shape)
    for length in PROBED_LENGTHS:
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
        tokens = Tokens(ids=ids, positions=ids, page_table=jax.ShapeDtypeStruct((1, 8), jnp.int32))
        try:
            jax.eval_shape(traced, params, (table, table), pages, tokens)
        except (NotImplementedError, ValueError) as error:
            return str(error)
    return None
