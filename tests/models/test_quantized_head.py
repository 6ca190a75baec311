# SPDX-License-Identifier: Apache-2.0
"""Heads whose matrices are rounded to 8 bits: what is rounded, how, and what is refused."""

import dataclasses
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.heads import quantize
from detjax.models.heads.head import DraftHead, draft_logits, head_pass, read_features
from detjax.models.heads.quantize import quantize_head
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel
from detjax.models.registry import family_named
from detjax.models.transformer import Stream
from detjax.opening import load_drafts
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear.api import linear
from detjax.pallas_kernels.linear.quantized import W8A8Matrix
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.testing.eagle import abstract_head, dummy_eagle, dummy_head, write_dummy_head
from detjax.testing.mtp import random_mtp_head

TARGET = dummy_config(vocab_size=320, num_layers=4)
HEAD = dummy_eagle(TARGET, draft_vocab_size=256)
MATRICES = {"fc", "qkv", "o", "gate_up", "down", "lm_head"}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return dummy_model(TARGET)


def rounded(head: DraftHead) -> DraftHead:
    quantize_head(head, "int8")
    return head


def are_8_bit(head: DraftHead) -> set[str]:
    return {name for name, w in head.params.items() if isinstance(w, W8A8Matrix)}


def logits_of(model: LoadedModel, head: DraftHead) -> np.ndarray:
    """Of the draft behind a text of random tokens and hidden states."""
    config = head.head_config
    ctx = ForwardContext(config=config.layer, profile=model.profile, backend=model.backend, tp=1)
    shape = config.layer.num_kv_heads, model.profile.attention_block, config.layer.head_dim
    pages = jnp.zeros((1, 1, 2, *shape), model.profile.cache_dtype)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 320, (1, 8)), jnp.int32)
    positions = jnp.arange(8, dtype=jnp.int32)[None]
    tokens = Tokens(ids=ids, positions=positions, page_table=jnp.zeros((1, 1), jnp.int32))
    features = jnp.asarray(rng.standard_normal((8, config.features_width)), jnp.bfloat16)

    def run(params, tables):
        hidden = read_features(ctx, config, params, features)
        wanted = jnp.full(1, 7, jnp.int32)
        _, left, _ = head_pass(ctx, config, params, tables, pages, tokens, hidden, wanted)
        return draft_logits(ctx, params, left)

    of_mesh = partial(jax.shard_map, mesh=model.mesh, out_specs=P(), check_vma=False)
    step = jax.jit(of_mesh(run, in_specs=(head.partition_specs, P())))
    return np.asarray(step(head.params_beside(model.params), head.rope_tables))[0]


# -------------------------------------------------------------------------------------- what it is


def test_every_matrix_is_rounded_to_nearest_with_a_scale_a_channel(model):
    plain, head = dummy_head(model, HEAD), rounded(dummy_head(model, HEAD))
    assert are_8_bit(head) == MATRICES
    for name in MATRICES:
        wide, w = np.asarray(plain.params[name], np.float32), head.params[name]
        scales = np.asarray(w.scales)[:, None]
        assert w.values.dtype == jnp.int8 and np.abs(np.asarray(w.values)).max(axis=1).min() == 127
        error = np.abs(np.asarray(w.values) * scales - wide)
        assert (error <= 0.5001 * scales).all()
    for name in plain.params.keys() - MATRICES:
        np.testing.assert_array_equal(np.asarray(head.params[name]), np.asarray(plain.params[name]))


def test_its_logits_are_near_those_of_the_plain_head_and_not_the_same(model):
    plain = logits_of(model, dummy_head(model, HEAD))
    found = logits_of(model, rounded(dummy_head(model, HEAD)))
    error = np.linalg.norm(found - plain) / np.linalg.norm(plain)
    assert 1e-3 < error < 0.05


@pytest.mark.control
def test_control_one_scale_too_large_moves_the_logits(model):
    plain, head = logits_of(model, dummy_head(model, HEAD)), rounded(dummy_head(model, HEAD))
    down = head.params["down"]
    head.params["down"] = dataclasses.replace(down, scales=2 * down.scales)
    assert np.linalg.norm(logits_of(model, head) - plain) / np.linalg.norm(plain) > 0.05


def test_an_mtp_head_is_rounded_but_for_what_it_has_of_the_model():
    config = dummy_config(vocab_size=320, num_layers=2, qkv_bias=True)
    model, family = dummy_model(config), family_named("mimo")
    assert family is not None and family.mtp is not None
    layout = family.mtp.behind(2)
    plain, head = random_mtp_head(model, layout), rounded(random_mtp_head(model, layout))
    assert are_8_bit(head) == {"join", "qkv", "o", "gate_up", "down"}
    given = head.params_beside(model.params)
    assert given["lm_head"] is model.params["lm_head"] and given["embed"] is model.params["embed"]
    wide, found = logits_of(model, plain)[:320], logits_of(model, head)[:320]
    assert 1e-3 < np.linalg.norm(found - wide) / np.linalg.norm(wide) < 0.05


def test_weights_go_to_the_host_and_come_back_with_their_bits(model):
    head = rounded(dummy_head(model, HEAD))
    before = jax.device_get(head.params)
    head.put_weights_back(head.take_weights_to_host())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(head.params), before)
    assert are_8_bit(head) == MATRICES


# ---------------------------------------------------------------------------------------- as a user


def test_a_head_is_rounded_when_it_is_loaded(model, tmp_path):
    folder = str(write_dummy_head(tmp_path, HEAD))
    for quantization, expected in ((None, set()), ("int8", MATRICES)):
        config = SpeculativeConfig(method="eagle3", model=folder, quantization=quantization)
        head = load_drafts(config, model=model, tokenizer=None)  # type: ignore[arg-type]
        assert isinstance(head, DraftHead) and are_8_bit(head) == expected
    assert "int8, 3 tokens a window" in str(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle3", "model": "x", "quantization": "fp4"}, "'fp4' must be 'int8' or null"),
        ({"method": "mtp", "quantization": ["int8"]}, r"\['int8'\] must be 'int8' or null"),
        ({"model": "x", "quantization": "int8"}, "not 'draft_model'; leave it out .a draft model"),
        ({"method": "ngram", "quantization": "int8"}, "not 'ngram'; leave it out$"),
    ],
)
def test_a_quantization_that_does_not_fit_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(given)


# ------------------------------------------------------------------------------- what kernels take


def abstract(width: int, draft_vocab_size: int) -> DraftHead:
    """A head of shapes for sm90, beside a model of that width."""
    config = dummy_config(
        num_heads=8, num_kv_heads=2, head_dim=128, hidden_size=width, intermediate_size=1536,
        vocab_size=1024, num_layers=4,
    )  # fmt: skip
    model = dataclasses.replace(dummy_model(TARGET), backend=Backend.SM90)
    return abstract_head(model, dummy_eagle(config, draft_vocab_size=draft_vocab_size))


def test_a_matrix_that_the_kernels_refuse_stays_and_is_named(caplog):
    head = abstract(512, 500)
    with caplog.at_level(logging.WARNING, quantize.__name__):
        names = quantize.matrices_to_quantize(head, "int8")
    assert set(names) == MATRICES - {"lm_head"}
    (said,) = caplog.messages
    assert "'lm_head' of an EAGLE-3 head stays as it is" in said and "64 rows, not 500" in said


def test_a_vocabulary_that_the_kernels_refuse_is_multiplied_by_xla():
    head = abstract(512, 500)
    config, of_rows = head.head_config, jax.ShapeDtypeStruct((2, 512), jnp.bfloat16)
    ctx = ForwardContext(config=config.layer, profile=head.profile, backend=Backend.SM90, tp=1)
    logits = jax.eval_shape(
        lambda params, rows: draft_logits(ctx, params, Stream(rows, None)), head.params, of_rows
    )
    assert logits.shape == (2, 500)
    with pytest.raises(NotImplementedError, match="500"):  # control: why it is
        product = partial(linear, out_dtype=jnp.dtype(jnp.float32), backend=Backend.SM90)
        jax.eval_shape(product, of_rows, head.params["lm_head"])


def test_a_head_of_which_nothing_can_be_rounded_is_refused(monkeypatch, model):
    monkeypatch.setattr(quantize, "_why_refused", lambda *_: "too narrow")
    with pytest.raises(ValueError, match=r"no matrix of an EAGLE-3 head .* .too narrow.; leave"):
        quantize_head(dummy_head(model, HEAD), "int8")
