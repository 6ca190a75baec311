# SPDX-License-Identifier: Apache-2.0
"""Hidden states of whole texts, as a model's canonical steps leave them to a head."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from detjax.array_types import Activation, Array
from detjax.compilation.xla_flags import EXACT_OPTIONS
from detjax.models.decoder import forward
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel
from detjax.models.pages import cache_of
from detjax.models.taps import FeatureTaps

GivesStates = Callable[[np.ndarray], tuple[Activation[Array, "B T X"], Activation[Array, "B T D"]]]
"""From token ids, int32 [B, T]: hidden states of each side by side, and the last of all,
normalised, of which the model's logits are."""


def text_states(model: LoadedModel, layers: Sequence[int], shape: tuple[int, int]) -> GivesStates:
    """Return a compiled step that gives the hidden states of a batch of texts.

    Args:
        model: On a mesh of one device.
        layers: As `HeadConfig.feature_layers` has them.
        shape: Texts of a batch, and tokens of each.

    Raises:
        ValueError: If the mesh has several devices.
    """
    if model.mesh.size > 1:
        raise ValueError(f"a mesh of {model.mesh.size} devices; give dp=1 and tp=1")
    batch, length = shape
    config, page_len = model.config, model.profile.attention_block
    context = ForwardContext(config=config, profile=model.profile, backend=model.backend, tp=1)
    num_pages = -(-length // page_len)

    def empty(num_layers: int, *page: int, dtype: jnp.dtype, is_local: bool = False) -> jax.Array:
        return jnp.zeros((num_layers, batch * num_pages, *page), dtype)

    table = np.arange(batch * num_pages, dtype=np.int32).reshape(batch, num_pages)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), shape)

    def local(params, tables, ids):
        taps = FeatureTaps(layers)
        tokens = Tokens(ids=ids, positions=jnp.asarray(positions), page_table=jnp.asarray(table))
        pages = cache_of(config, model.profile, num_kv_slots=model.num_kv_slots, make=empty)
        watched = dataclasses.replace(context, taps=taps)
        _, last = forward(watched, params, tables, pages, tokens)
        return taps.features().reshape(batch, length, -1), last.reshape(batch, length, -1)

    specs = model.partition_specs, P(), P()
    step = jax.jit(
        jax.shard_map(local, mesh=model.mesh, in_specs=specs, out_specs=P(), check_vma=False),
        compiler_options=EXACT_OPTIONS,
    )
    return lambda ids: step(model.params, model.rope_tables, np.asarray(ids, np.int32))
