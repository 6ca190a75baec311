# SPDX-License-Identifier: Apache-2.0
"""Small models with random weights, and requests and answers for them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.compilation.xla_flags import EXACT_OPTIONS, FAST_OPTIONS
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import PAGES_SPEC
from detjax.models.abstract import why_unsupported
from detjax.models.adapters.low_rank import Adapter
from detjax.models.config import ExpertConfig, ModelConfig, RopeConfig
from detjax.models.forward_paths import FORWARD_PATHS, KernelMode
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel, place_model
from detjax.models.params import ParamRole, TensorSpec, param_specs, stored_rows
from detjax.models.weights.assemble import assemble
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.parallel.collectives import gather_columns
from detjax.parallel.mesh import DP_AXIS, TP_AXIS, make_mesh
from detjax.testing.bitwise import assert_bitwise_equal


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
    experts: tuple[int, int] | None = None,
    expert_width: int = 48,
) -> ModelConfig:
    """A decoder whose every width allows tp up to 8 and whose down_proj is no power of two.

    With `experts` (their number, and how many a token has) every feed-forward layer but the first
    of several is a mixture; an expert has `expert_width` channels.
    """
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
        experts=None
        if experts is None
        else ExpertConfig(
            num_experts=experts[0],
            top_k=experts[1],
            width=expert_width,
            renormalise=True,
            layers=tuple(i > 0 or num_layers == 1 for i in range(num_layers)),
        ),
    )


def cpu_backend(config: ModelConfig, profile: NumericsProfile, tp: int = 1) -> Backend:
    """The backend that runs a model where there is no GPU."""
    refused = {b: why_unsupported(config, profile, b, tp) for b in KERNELS if b.platform == "cpu"}
    return next(backend for backend, refusal in refused.items() if refusal is None)


def dummy_model(
    config: ModelConfig,
    *,
    dp: int = 1,
    tp: int = 1,
    profile: NumericsProfile | None = None,
    backend: Backend | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Random weights on a (dp, tp) mesh, equal for every mesh; drawn on the host, to start fast.

    Without `backend` it is that of a machine without a GPU.
    """
    profile = profile or NumericsProfile()
    backend = backend or cpu_backend(config, profile, tp)
    mesh = make_mesh(dp, tp, platform=backend.platform)
    specs = param_specs(config, tp=tp, vocab_block=profile.vocab_block)

    def make(spec: TensorSpec) -> jax.Array:
        drawn = [
            np.random.default_rng([seed, *name.encode()]).standard_normal(spec.hf_shape, np.float32)
            for name in spec.hf_names
        ]
        values = np.stack(drawn) if spec.num_experts else drawn[0]
        matrices = ParamRole.MATRIX, ParamRole.TABLE, ParamRole.EXPERT, ParamRole.PROJECTION
        if spec.role in matrices:
            values *= spec.hf_shape[1] ** -0.5
        elif spec.role is ParamRole.GAIN:
            values = 1 + 0.1 * values
        # The values are bfloat16 in either dtype, so a profile changes only the arithmetic.
        tensor = jnp.asarray(values, jnp.bfloat16).astype(spec.dtype(profile.param_dtype))
        return jax.device_put(stored_rows(tensor, spec), NamedSharding(mesh, spec.partition))

    return place_model(
        config,
        lambda: assemble(specs, mesh, make),
        profile=profile,
        mesh=mesh,
        backend=backend,
        folder=None,
    )


def mixed_requests(count: int = 17, *, vocab_size: int, max_tokens: int) -> list[Request]:
    """Prompts of lengths around a page and a chunk, greedy and sampled in every way."""
    rng = np.random.default_rng(11)
    lengths = (5, 127, 1, 130, 64, 33, 200, 17, 128, 2, 65, 96, 63, 12, 150, 40, 7)
    kinds = (
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_k": 5, "seed": 2**63 + 5},
        {"temperature": 1.3, "top_p": 0.7, "seed": 3},
        {"temperature": 0.9, "min_p": 0.05, "top_p": 0.95, "top_k": 50, "seed": 4},
    )
    return [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, vocab_size, lengths[i])),
            sampling=SamplingParams(max_tokens=max_tokens, **kinds[i % len(kinds)]),
        )
        for i in range(count)
    ]


def adjusted_requests(*, vocab_size: int, max_tokens: int) -> list[Request]:
    """Return requests with biases, penalties and masks, and a plain neighbour.

    Args:
        vocab_size: Above 301.
        max_tokens: Of each; above 8.
    """
    kinds: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"temperature": 0.8, "seed": 2, "logit_bias": ((5, 4.0), (17, -3.0), (300, 6.0))},
        {
            "temperature": 1.0, "seed": 3, "bad_words_token_ids": ((4,), (5, 6)), "min_tokens": 9,
            "stop_token_ids": tuple(range(60)), "logprobs_mode": "processed",
        },
        {
            "temperature": 0.7, "seed": 4, "top_k": 9, "logprobs_mode": "processed",
            "allowed_token_ids": tuple(range(0, vocab_size, 3)), "logprobs": 3,
        },
        {
            # Two tokens again and again, until their own number is in their way.
            "temperature": 0.9, "seed": 5, "frequency_penalty": 1.9, "repetition_penalty": 1.1,
            "logit_bias": ((300, 9.0), (301, 8.5)),
        },
        {"temperature": 0.9, "seed": 6},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = 5, 40, 130, 17, 64, 3
    return [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, vocab_size, length)),
            sampling=SamplingParams(max_tokens=max_tokens, **kind),
        )
        for length, kind in zip(lengths, kinds, strict=True)
    ]


def answers(
    model: LoadedModel,
    requests: Sequence[Request],
    *,
    batch_size: int = 1,
    prefill_chunk: int = 64,
    max_len: int = 384,
    adapters: Sequence[Adapter] = (),
) -> list[Completion]:
    """Run requests on a fresh engine, which knows these adapters."""
    config = EngineConfig(batch_size=batch_size, prefill_chunk=prefill_chunk, max_len=max_len)
    engine = Engine(model, config)
    for adapter in adapters:
        engine.add_adapter(adapter)
    return engine.generate(requests)


def assert_same_completions(actual: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Require equal tokens, bits of logprobs and reasons of the end.

    Raises:
        AssertionError: If they differ.
    """
    assert [done.token_ids for done in actual] == [done.token_ids for done in expected]
    for done, other in zip(actual, expected, strict=True):
        assert_bitwise_equal(
            np.array(done.logprobs), np.array(other.logprobs), claim="drafts change no bit"
        )
        assert done.finish_reason == other.finish_reason


def scoring_step(model: LoadedModel, kernels: KernelMode = "invariant") -> Callable:
    """Return a jitted step that gives the logits of every new token instead of choosing one.

    `step(pages, tokens) -> (pages, logits[B, T, V])`, on a mesh with dp = 1.
    """
    forward, local_logits = FORWARD_PATHS[kernels]
    ctx = ForwardContext(
        config=model.config,
        profile=model.profile,
        backend=model.backend,
        tp=model.mesh.shape[TP_AXIS],
    )
    assert model.mesh.shape[DP_AXIS] == 1

    def local(params, tables, pages, tokens):
        pages, hidden = forward(ctx, params, tables, pages, tokens)
        logits = local_logits(ctx, params, hidden.reshape(-1, hidden.shape[-1]))
        logits = gather_columns(logits, TP_AXIS)[:, : model.config.vocab_size]
        return pages, logits.reshape(*tokens.ids.shape, -1)

    specs = (model.partition_specs, P(), PAGES_SPEC, P())
    step = jax.jit(
        jax.shard_map(
            local, mesh=model.mesh, in_specs=specs, out_specs=(PAGES_SPEC, P()), check_vma=False
        ),
        compiler_options=EXACT_OPTIONS if kernels == "invariant" else FAST_OPTIONS,
    )
    return lambda pages, tokens: step(model.params, model.rope_tables, pages, tokens)


def batch_of(rows: Sequence[tuple[Sequence[int] | np.ndarray, int]], table: np.ndarray) -> Tokens:
    """Lay out (token ids, position of the first) of each row, padded to the longest."""
    length = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), length), np.int32)
    positions = np.full((len(rows), length), -1, np.int32)
    for row, (tokens, start) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        positions[row, : len(tokens)] = np.arange(start, start + len(tokens))
    return Tokens(ids=ids, positions=positions, page_table=table)
