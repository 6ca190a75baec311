# SPDX-License-Identifier: Apache-2.0
"""Ten faults of kernels and engine, each as a patch of the code that programs trace.

`detjax.certify` and the self-checks of an engine must find them. `detjax.diverge` must name the
operation. Give `monkeypatch.setattr` as `patch`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import detjax.engine.running.programs as programs
import detjax.engine.sampling.sampling as sampling
import detjax.models.decoder as decoder
import detjax.models.layers as layers
import detjax.pallas_kernels.attention.portable as attention
from detjax.models.loading import LoadedModel
from detjax.pallas_kernels.fixed_blocks import round_to

Patch = Callable[[Any, str, Any], None]

FEW_PAGES = 4
"""Where offsets wrap, in pages. On a GPU 2**32 bytes of a layer are thousands of pages, which no
CPU test has: the fault is the same with a smaller modulus."""


def is_decode(positions) -> bool:
    """Whether a step has one token a row."""
    return positions.shape[1] == 1


def choose_splits_by_batch(patch: Patch) -> None:
    """Halve the splits if there are several rows."""
    right = attention._attention

    def wrong(q, *args, profile, **options):
        if q.shape[0] > 1:
            half = profile.attention_split // 2
            profile = dataclasses.replace(profile, attention_split=half)
        return right(q, *args, profile=profile, **options)

    patch(attention, "_attention", wrong)


def drop_key_at_page_end(patch: Patch) -> None:
    """A decode step does not write the last token of a page."""
    right = attention.rope_into_cache

    def wrong(qkv, rotation, place, **options):
        positions, page_len = place.positions, place.pages.shape[4]
        if is_decode(positions):
            positions = jnp.where(positions % page_len == page_len - 1, -1, positions)
        return right(qkv, rotation, place._replace(positions=positions), **options)

    patch(attention, "rope_into_cache", wrong)


def read_a_stale_page(patch: Patch) -> None:
    """A decode step reads the first page of a sequence in place of the second."""
    right = attention.attention

    def wrong(q, place, **options):
        table = place.page_table
        if is_decode(place.positions) and table.shape[1] > 1:
            table = table.at[:, 1].set(table[:, 0])
        return right(q, place._replace(page_table=table), **options)

    patch(attention, "attention", wrong)


def sum_ranks_by_psum(patch: Patch) -> None:
    """Ranks are added in an order that the mesh chooses."""

    def wrong(x, axis, size, *, backend):
        return lax.psum(x, axis)  # noqa: TID251  it is the fault

    patch(layers, "butterfly_sum", wrong)


def accept_a_draft_too_many(patch: Patch) -> None:
    """A verification commits the first wrong draft as well."""
    right = programs.pack_verified

    def wrong(choice, num_accepted, *, length):
        return right(choice, jnp.minimum(num_accepted + 1, length - 1), length=length)

    patch(programs, "pack_verified", wrong)


def key_noise_by_row(patch: Patch) -> None:
    """Use the row of a step in place of the position."""
    right = sampling.noise.row_key

    def wrong(low, high, sequence_idx, position):
        rows = jnp.arange(position.size, dtype=jnp.int32)
        return right(low, high, sequence_idx, rows)

    patch(sampling.noise, "row_key", wrong)


def take_the_next_rope_row(patch: Patch) -> None:
    """A decode step rotates by the next position."""
    right = decoder.rope_rows

    def wrong(tables, positions):
        return right(tables, positions + int(is_decode(positions)))

    patch(decoder, "rope_rows", wrong)


def round_the_residual_early(patch: Patch) -> None:
    """With few rows the product is rounded before the residual stream is added."""
    right = layers.linear_add_rms_norm

    def wrong(x, w, residual, bias, gain, *, reduction, eps, backend):
        if len(x) > 4:
            return right(x, w, residual, bias, gain, reduction=reduction, eps=eps, backend=backend)
        product = layers.linear_partial(x, w, reduction=reduction, backend=backend)
        product = round_to(product, residual.dtype)
        return layers.add_rms_norm(product, residual, bias, gain, eps=eps, backend=backend)

    patch(layers, "linear_add_rms_norm", wrong)


def keep_ties_of_top_p(patch: Patch) -> None:
    """With several rows, tokens as likely as the last one of the nucleus are kept too."""
    right = sampling._kept_tokens

    def wrong(ctx, logits, rows):
        kept = right(ctx, logits, rows)
        if len(logits) == 1:
            return kept
        least = jnp.min(jnp.where(kept, logits, jnp.inf), axis=1, keepdims=True)
        return kept | (logits >= least)

    patch(sampling, "_kept_tokens", wrong)


def wrap_offsets(patch: Patch) -> None:
    """A decode step reads and writes the page whose number is the remainder by `FEW_PAGES`.

    Offsets of 32 bits do this in a large cache, with a larger modulus.
    """
    right_write, right_read = attention.rope_into_cache, attention.attention

    def wrap(place):
        if not is_decode(place.positions):
            return place
        return place._replace(page_table=place.page_table % FEW_PAGES)

    def write(qkv, rotation, place, **options):
        return right_write(qkv, rotation, wrap(place), **options)

    def read(q, place, **options):
        return right_read(q, wrap(place), **options)

    patch(attention, "rope_into_cache", write)
    patch(attention, "attention", read)


FAULTS: dict[str, Callable[[Patch], None]] = {
    "splits chosen from the batch": choose_splits_by_batch,
    "a new key dropped at a page's end": drop_key_at_page_end,
    "a stale page": read_a_stale_page,
    "psum for the butterfly": sum_ranks_by_psum,
    "a draft accepted too many": accept_a_draft_too_many,
    "noise keyed by row": key_noise_by_row,
    "a wrong row of the rope table": take_the_next_rope_row,
    "a residual rounded early": round_the_residual_early,
    "a tie of top-p": keep_ties_of_top_p,
    "offsets that wrap in a large cache": wrap_offsets,
}


def with_ties(model: LoadedModel) -> LoadedModel:
    """Return the model with every logit twice, so that ties matter; on one device."""
    head = np.repeat(np.asarray(model.params["lm_head"])[::2], 2, axis=0)
    params = {**model.params, "lm_head": jnp.asarray(head)}
    return dataclasses.replace(model, params=params)
