# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, and what a request should get from them."""

from collections.abc import Sequence

from detjax.models.config import ModelConfig, RopeConfig
from detjax.models.loading import LoadedModel, random_model
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.serving.engine import Engine, EngineConfig
from detjax.serving.request import Completion, Request


def dummy_config(
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 64,
    intermediate_size: int = 384,
    num_layers: int = 2,
    vocab_size: int = 320,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    max_len: int = 1024,
) -> ModelConfig:
    """A decoder whose every width allows tp up to 8 and whose down_proj is no power of two."""
    return ModelConfig(
        family="dummy",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        sliding_windows=(window,) * num_layers,
        bos_token_id=None,
        eos_token_ids=(),
    )


def dummy_model(
    config: ModelConfig,
    *,
    dp: int = 1,
    tp: int = 1,
    profile: NumericsProfile | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Random weights on a (dp, tp) mesh, equal for every mesh."""
    return random_model(
        config,
        seed=seed,
        profile=profile or NumericsProfile(),
        mesh=make_mesh(dp, tp),
        backend=Backend.PORTABLE,
    )


def answers(
    model: LoadedModel,
    requests: Sequence[Request],
    *,
    batch_size: int = 1,
    prefill_chunk: int = 64,
    max_len: int = 384,
) -> list[Completion]:
    """Run requests on a fresh engine."""
    config = EngineConfig(batch_size=batch_size, prefill_chunk=prefill_chunk, max_len=max_len)
    return Engine(model, config).generate(requests)
