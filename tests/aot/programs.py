# SPDX-License-Identifier: Apache-2.0
"""What `test_sm90_code.py` compiles, a process each: `python tests/aot/programs.py NAME`.

Prints the kernels and the large copies of the program as one line of JSON. The shapes are those of
Llama-3.1-8B.
"""

import dataclasses
import functools
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from detjax.compilation.xla_flags import IN_PLACE_OPTIONS
from detjax.engine.running.device_arrays import pages_shape
from detjax.engine.running.program_key import AnyKey, ChoiceKey, InstallKey, ProgramKind, ScoreKey
from detjax.engine.running.programs import DRAFTS, ProgramCache
from detjax.models.abstract import abstract_params
from detjax.models.config import ExpertConfig, ModelConfig, RopeConfig
from detjax.models.fast import forward_fast, local_logits_fast
from detjax.models.forward_paths import KernelMode
from detjax.models.heads.head import DraftHead
from detjax.models.hf_config import config_from_hf
from detjax.models.layers import (
    ForwardContext,
    Tokens,
    adapted_linear,
    gated_layer,
    product_of_stream,
    row_parallel_norm,
)
from detjax.models.loading import LoadedModel
from detjax.models.params import MATRICES, padded_vocab_size, partition_specs
from detjax.models.registry import FAMILIES as REGISTRY
from detjax.models.transformer import Stream
from detjax.models.weights import blake3, device_hashing
from detjax.numerics import NumericsProfile, tree_reduction
from detjax.pallas_kernels.attention.api import attention, rope_attention
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.linear import sm90
from detjax.pallas_kernels.linear.api import (
    linear,
    linear_add,
    linear_add_rms_norm,
    norm_linear_swiglu,
)
from detjax.pallas_kernels.linear.quantized import (
    CodeType,
    QuantizedMatrix,
    W8A8Matrix,
    packed_shape,
)
from detjax.pallas_kernels.linear.tiles import OperandType
from detjax.pallas_kernels.lora.adapted import AdaptedMatrix, AdapterStack
from detjax.pallas_kernels.moe.api import (
    expert_linear,
    expert_mlp,
    route_mlp,
    route_mlp_add_rms_norm,
)
from detjax.pallas_kernels.moe.expert_weights import ExpertWeights, SharedExpert
from detjax.pallas_kernels.paged_cache import CachePlace
from detjax.pallas_kernels.rope.rotation import Rotation
from detjax.parallel.exchange import EXCHANGE_SPECS, exchange_shapes
from detjax.testing import aot
from detjax.testing.dummies import dummy_config
from detjax.testing.eagle import abstract_head, dummy_eagle
from detjax.testing.mtp import abstract_mtp_head
from detjax.testing.programs import plain_key, programs_for
from detjax.testing.quantized import abstract_quantized_head
from detjax.testing.shapes import LAYOUTS, MOE_SHAPES

BF16 = jnp.dtype(jnp.bfloat16)
PROFILE = NumericsProfile()
FLOAT32 = NumericsProfile(compute_dtype="float32")
FLOAT8_CACHE = NumericsProfile(kv_cache_dtype="fp8_e4m3")
LARGE_BYTES = 1 << 20
"""Copies of less are of tokens, tables and results."""


def _shape(*dims: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def qkv(num_rows: int) -> aot.CompiledProgram:
    """A product of one leaf."""

    def run(x, w):
        return linear(x, w, out_dtype=BF16, backend=Backend.SM90)

    return aot.compile_program(run, _shape(num_rows, 4096), _shape(6144, 4096))


def down(num_rows: int) -> aot.CompiledProgram:
    """The tree of eight leaves, with the residual and the norm after it."""
    reduction = tree_reduction(14336, PROFILE)

    def run(x, w, residual, gain):
        return linear_add_rms_norm(
            x, w, residual, None, gain, reduction=reduction, eps=1e-5, backend=Backend.SM90
        )

    shapes = (_shape(num_rows, 14336), _shape(4096, 14336), _shape(num_rows, 4096), _shape(4096))
    return aot.compile_program(run, *shapes)


def w8a8(num_rows: int, dtype, *, has_blocks: bool = False) -> aot.CompiledProgram:
    """A feed-forward layer of 8-bit activations and weights."""

    def run(x, gain, gate_up, down):
        gate_up, down = (W8A8Matrix(values=v, scales=s) for v, s in (gate_up, down))
        y = norm_linear_swiglu(x, gain, gate_up, eps=1e-5, backend=Backend.SM90)
        reduction = tree_reduction(14336, PROFILE)
        return linear_add(y, down, x, None, reduction=reduction, backend=Backend.SM90)

    def matrix(num_out: int, num_in: int):
        scales = (num_out // 128, num_in // 128) if has_blocks else (num_out,)
        return _shape(num_out, num_in, dtype=dtype), _shape(*scales, dtype=jnp.float32)

    shapes = (_shape(num_rows, 4096), _shape(4096), matrix(28672, 4096), matrix(4096, 14336))
    return aot.compile_program(run, *shapes)


def adapted(num_rows: int) -> aot.CompiledProgram:
    """A layer's products with 8 adapters of rank 16: q, k, v; gates and ups; a row-parallel one."""
    ctx = ForwardContext(config=llama(1), profile=PROFILE, backend=Backend.SM90, tp=1)

    def run(x, weights, stacks, slots, residual, gain):
        qkv, gate_up, o = (
            AdaptedMatrix(base=w, stack=stack, slots=slots)
            for w, stack in zip(weights, stacks, strict=True)
        )
        gated = gated_layer(ctx, {"gate_up": gate_up}, Stream(residual, x))[0]
        column = adapted_linear(ctx, x, qkv, None)
        return column, gated, *row_parallel_norm(ctx, x, o, residual, None, gain)

    sizes = ((3, 6144), (2, 28672), (1, 4096))
    weights = tuple(_shape(num_out, 4096) for _, num_out in sizes)
    stacks = tuple(
        AdapterStack(
            a=_shape(128 * parts, 4096), b=_shape(num_out, 128 * parts),
            scales=_shape(parts, 8, dtype=jnp.float32),
        )
        for parts, num_out in sizes
    )  # fmt: skip
    rows, slots = _shape(num_rows, 4096), _shape(num_rows, dtype=jnp.int32)
    return aot.compile_program(run, rows, weights, stacks, slots, rows, _shape(4096))


def norm_qkv(num_rows: int) -> aot.CompiledProgram:
    """A product of one leaf that normalises its input."""

    def run(x, gain, w):
        return sm90.norm_linear(x, gain, w, None, eps=1e-5, out_dtype=BF16)

    return aot.compile_program(run, _shape(num_rows, 4096), _shape(4096), _shape(6144, 4096))


def codes(num_rows: int, code_type: CodeType) -> aot.CompiledProgram:
    """A layer of codes without its attention, and the first q, k, v, which add nothing."""
    ctx = ForwardContext(config=llama(1), profile=PROFILE, backend=Backend.SM90, tp=1)

    def matrix(num_out: int, num_in: int) -> QuantizedMatrix:
        return QuantizedMatrix(
            codes=_shape(*packed_shape((num_out, num_in), code_type), dtype=jnp.int32),
            scales=_shape(num_in // 128, num_out),
            code_type=code_type, group_len=128, has_small_scales=True,
        )  # fmt: skip

    sizes = (4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096)
    leaves, treedef = jax.tree.flatten(tuple(matrix(*size) for size in sizes))

    def run(heads, residual, gain, *leaves):
        o, gate_up, down, qkv = jax.tree.unflatten(treedef, leaves)
        weights = {"gate_up": gate_up, "mlp_norm": gain, "qkv": qkv, "attn_norm": gain}
        first, stream = product_of_stream(ctx, weights, "qkv", Stream(residual, None))
        stream = row_parallel_norm(ctx, heads, o, stream.residual, None, gain)
        gated, stream = gated_layer(ctx, weights, stream)
        stream = row_parallel_norm(ctx, gated, down, stream.residual, None, gain)
        out, stream = product_of_stream(ctx, weights, "qkv", stream)
        return first, out, stream.residual

    rows = _shape(num_rows, 4096)
    return aot.compile_program(run, rows, rows, _shape(4096), *leaves)


def norm_gate_up(num_rows: int, width: int) -> aot.CompiledProgram:
    """Gates and ups of a product that normalises its input."""

    def run(x, gain, w):
        return sm90.norm_linear_swiglu(x, gain, w, eps=1e-5)

    return aot.compile_program(run, _shape(num_rows, width), _shape(width), _shape(28672, width))


def down_add(num_rows: int) -> aot.CompiledProgram:
    """The tree of eight leaves, added to the residual stream."""
    reduction = tree_reduction(14336, PROFILE)

    def run(x, w, residual):
        return linear_add(x, w, residual, None, reduction=reduction, backend=Backend.SM90)

    shapes = (_shape(num_rows, 14336), _shape(4096, 14336), _shape(num_rows, 4096))
    return aot.compile_program(run, *shapes)


def experts(num_rows: int, operands: OperandType = OperandType.BFLOAT16) -> aot.CompiledProgram:
    """A mixture of experts of Qwen3-30B-A3B: routing, products, residual stream and norm."""
    shape = MOE_SHAPES[0]
    num, width, hidden = shape.num_experts, shape.width, shape.hidden_size

    def matrix(num_out: int, num_in: int):
        values = _shape(num, num_out, num_in, dtype=operands.dtype)
        if operands is OperandType.BFLOAT16:
            return values
        has_blocks = operands is OperandType.FLOAT8_BLOCKS
        scales = (num_out // 128, num_in // 128) if has_blocks else (num_out,)
        return values, _shape(num, *scales, dtype=jnp.float32)

    def run(x, logits, w_gate_up, w_down, residual, gain):
        if operands is not OperandType.BFLOAT16:
            w_gate_up, w_down = (W8A8Matrix(values=v, scales=s) for v, s in (w_gate_up, w_down))
        return route_mlp_add_rms_norm(
            x, logits, ExpertWeights(w_gate_up, w_down), residual, gain,
            top_k=shape.top_k, renormalise=shape.renormalise, eps=1e-6, backend=Backend.SM90,
        )  # fmt: skip

    shapes = (
        _shape(num_rows, hidden),
        _shape(num_rows, num, dtype=jnp.float32),
        matrix(2 * width, hidden),
        matrix(hidden, width),
        _shape(num_rows, hidden),
        _shape(hidden),
    )
    return aot.compile_program(run, *shapes)


def shared_experts(operands: OperandType) -> aot.CompiledProgram:
    """One row of Qwen3.5-35B-A3B: routing and products, those of the shared expert too."""
    num, width, hidden = 256, 512, 2048

    def matrix(*dims: int):
        values = _shape(*dims, dtype=operands.dtype)
        if operands is OperandType.BFLOAT16:
            return values
        blocks = operands is OperandType.FLOAT8_BLOCKS
        scales = (*dims[:-2], dims[-2] // 128, dims[-1] // 128) if blocks else dims[:-1]
        return values, _shape(*scales, dtype=jnp.float32)

    def run(x, logits, *matrices):
        if operands is not OperandType.BFLOAT16:
            matrices = [W8A8Matrix(values=v, scales=s) for v, s in matrices]
        experts, shared = ExpertWeights(*matrices[:2]), SharedExpert(*matrices[2:])
        return route_mlp(
            x, logits, experts, top_k=8, renormalise=True, shared=shared, backend=Backend.SM90
        )

    return aot.compile_program(
        run, _shape(1, hidden), _shape(1, num + 64, dtype=jnp.float32),
        matrix(num, 2 * width, hidden), matrix(num, hidden, width),
        matrix(2 * width, hidden), matrix(hidden, width),
    )  # fmt: skip


def expert_rows(num_slots: int) -> aot.CompiledProgram:
    """What a backward pass multiplies by the transposed second matrix of each expert."""
    shape = MOE_SHAPES[0]
    num, width, hidden = shape.num_experts, shape.width, shape.hidden_size

    def run(x, experts, w):
        return expert_linear(x, experts, w, out_dtype=x.dtype, backend=Backend.SM90)

    return aot.compile_program(
        run,
        _shape(num_slots, hidden),
        _shape(num_slots, dtype=jnp.int32),
        _shape(num, width, hidden),
    )


def expert_share(num_rows: int) -> aot.CompiledProgram:
    """The experts of a rank of four, in order of slot."""
    shape = MOE_SHAPES[0]
    num, width, hidden = shape.num_experts // 4, shape.width, shape.hidden_size

    def run(x, ids, w_gate_up, w_down, first_expert):
        return expert_mlp(
            x, ids, ExpertWeights(w_gate_up, w_down),
            first_expert=first_expert, num_ranks=4, backend=Backend.SM90,
        )  # fmt: skip

    return aot.compile_program(
        run,
        _shape(num_rows, hidden),
        _shape(num_rows, shape.top_k, dtype=jnp.int32),
        _shape(num, 2 * width, hidden),
        _shape(num, hidden, width),
        _shape(dtype=jnp.int32),
    )


def attend(
    batch: int, length: int, context: int, *, layout: str = "llama3_8b",
    window: int | None = None, softcap: float | None = None, profile: NumericsProfile = PROFILE,
) -> aot.CompiledProgram:  # fmt: skip
    """Attention of the heads of a model; by default 32 and 8 of 128 channels."""
    num_pages, dims = context // 128, LAYOUTS[layout]

    def run(q, pages, table, positions):
        place = CachePlace(pages, table, positions, layer=0)
        options = {"window": window, "softcap": softcap, "profile": profile}
        return attention(q, place, **options, backend=Backend.SM90)

    pages = (1, batch * num_pages, 2, dims.num_kv_heads, 128, dims.channels)
    return aot.compile_program(
        run,
        _shape(batch, length, dims.num_heads, dims.channels),
        _shape(*pages, dtype=profile.cache_dtype),
        _shape(batch, num_pages, dtype=jnp.int32),
        _shape(batch, length, dtype=jnp.int32),
    )


def attend_new(
    batch: int, context: int, *, layout: str = "llama3_8b", profile: NumericsProfile = PROFILE
) -> aot.CompiledProgram:
    """Rotation, cache write and attention of one new token a sequence."""
    num_pages, dims = -(-context // 128), LAYOUTS[layout]

    def run(qkv, cos, sin, pages, table, positions, o):
        return rope_attention(
            qkv, Rotation(cos, sin), CachePlace(pages, table, positions, layer=0),
            window=None, eps=1e-5, profile=profile, backend=Backend.SM90, prefetch=o,
        )  # fmt: skip

    shapes = (
        _shape(batch, dims.num_heads + 2 * dims.num_kv_heads, dims.channels),
        _shape(batch, dims.channels // 2, dtype=jnp.float32),
        _shape(batch, dims.channels // 2, dtype=jnp.float32),
        _shape(
            1,
            batch * num_pages,
            2,
            dims.num_kv_heads,
            128,
            dims.channels,
            dtype=profile.cache_dtype,
        ),
        _shape(batch, num_pages, dtype=jnp.int32),
        _shape(batch, 1, dtype=jnp.int32),
        _shape(4096, 4096),
    )
    whole = NamedSharding(aot.h200_mesh(), P())
    jitted = jax.jit(run, in_shardings=whole, donate_argnums=3)
    return aot.inspect_program(lambda: jitted.lower(*shapes).compile())


def llama(num_layers: int) -> ModelConfig:
    """Llama-3.1-8B with fewer layers."""
    return ModelConfig(
        family="llama", vocab_size=128256, hidden_size=4096, num_layers=num_layers, num_heads=32,
        num_kv_heads=8, head_dim=128, intermediate_size=14336, rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0), max_position_embeddings=8192, tie_word_embeddings=False,
        qkv_bias=False, o_bias=False, qk_norm=False, sliding_windows=(None,) * num_layers,
        bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip


def qwen3_moe(num_layers: int) -> ModelConfig:
    """Qwen3-30B-A3B with fewer layers."""
    experts = ExpertConfig(
        num_experts=128, top_k=8, width=768, renormalise=True, layers=(True,) * num_layers
    )
    return dataclasses.replace(
        llama(num_layers), family="qwen3_moe", vocab_size=151936, hidden_size=2048,
        num_kv_heads=4, intermediate_size=6144, qk_norm=True, experts=experts,
    )  # fmt: skip


def mixtral(num_layers: int) -> ModelConfig:
    """Mixtral-8x7B with fewer layers."""
    experts = ExpertConfig(
        num_experts=8, top_k=2, width=14336, renormalise=True, layers=(True,) * num_layers
    )
    return dataclasses.replace(
        llama(num_layers), family="mixtral", vocab_size=32000, experts=experts,
        rope=RopeConfig(theta=1e6),
    )  # fmt: skip


def abstract_model(
    num_layers: int,
    memory_bytes: int = aot.H200_BYTES,
    *,
    dp: int = 1,
    tp: int = 1,
    make_config: Callable[[int], ModelConfig] = llama,
    profile: NumericsProfile = PROFILE,
) -> LoadedModel:
    """A model with few layers, as shapes on the compiler's H200s."""
    config = make_config(num_layers)
    mesh = aot.h200_mesh(memory_bytes, dp=dp, tp=tp)
    params = abstract_params(config, mesh, profile=profile)
    of_params = partition_specs(config, tp=tp, vocab_block=profile.vocab_block)
    if tp > 1:
        params["exchange"] = exchange_shapes(
            mesh, width=config.hidden_size, dtype=profile.activation_dtype, backend=Backend.SM90,
            padded_vocab=padded_vocab_size(
                config.vocab_size, tp=tp, vocab_block=profile.vocab_block
            ),
        )  # fmt: skip
        of_params["exchange"] = EXCHANGE_SPECS
    table = _shape(8192, len(config.ropes) * config.head_dim // 2, dtype=jnp.float32)
    table = table.update(sharding=NamedSharding(mesh, P()))
    return LoadedModel(
        config=config,
        params=params,
        partition_specs=of_params,
        rope_tables=(table, table),
        mesh=mesh,
        profile=profile,
        backend=Backend.SM90,
        fingerprint="",
        folder=None,
    )


def decode_step() -> aot.CompiledProgram:
    """A whole decode step of two layers at batch 8."""
    model = abstract_model(2)
    key = plain_key("decode", rows=8, table_len=8)
    programs = programs_for(model, num_pages=64, num_slots=8)
    return aot.inspect_program(lambda: programs.get(key, model.params))


def decode_launch(mode: KernelMode, weights: str) -> aot.CompiledProgram:
    """Four tokens of eight sequences in one launch, two layers."""
    model = abstract_model(2)
    key = plain_key("decode", rows=8, length=4, table_len=8, mode=mode, weights=weights)
    params = model.params if weights == "full" else quantised(model, weights)
    programs = programs_for(model, num_pages=64, num_slots=8)
    return aot.inspect_program(lambda: programs.get(key, params))


def quantised(model: LoadedModel, weight_dtype: str) -> dict:
    """Shapes of a model's weights with 8-bit matrices."""

    def stored(w):
        if w.dtype == weight_dtype:
            return w
        return {"q": w.update(dtype=weight_dtype), "scale": _shape(w.shape[0], dtype=jnp.float32)}

    layers = [
        {name: stored(leaf) if name in MATRICES else leaf for name, leaf in layer.items()}
        for layer in model.params["layers"]
    ]
    return {**model.params, "layers": layers, "lm_head": stored(model.params["lm_head"])}


def fast_step(weight_dtype: str) -> aot.CompiledProgram:
    """A decode step of two layers at batch 8 without claims, up to the logits."""
    model = abstract_model(2)
    ctx = ForwardContext(config=model.config, profile=PROFILE, backend=Backend.SM90, tp=1)
    params = quantised(model, weight_dtype)

    def step(params, tables, pages, tokens):
        pages, hidden = forward_fast(ctx, params, tables, pages, tokens)
        return pages, local_logits_fast(ctx, params, hidden[:, 0])

    sharded = jax.shard_map(step, mesh=model.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    ids = _shape(8, 1, dtype=jnp.int32)
    tokens = Tokens(ids=ids, positions=ids, page_table=_shape(8, 8, dtype=jnp.int32))
    whole = NamedSharding(model.mesh, P())
    jitted = jax.jit(sharded, in_shardings=whole, donate_argnums=2)
    lowered = jitted.lower(params, model.rope_tables, pages_shape(model, 64), tokens)
    return aot.inspect_program(lowered.compile)


PRESSED_BYTES = 4_000_000_000
"""Of a device that the weights of two layers and the cache fill: XLA saves memory where it can."""


def pressed(
    kind: ProgramKind,
    *,
    is_guarded: bool = True,
    dp: int = 1,
    tp: int = 1,
    make_config: Callable[[int], ModelConfig] = llama,
    profile: NumericsProfile = PROFILE,
    **sizes,
) -> aot.CompiledProgram:
    """A step of two layers on devices without memory to spare, as detjax compiles it.

    Not guarded: with everything small donated, and the passes on that the engine has off.
    """
    model = abstract_model(
        2, PRESSED_BYTES // tp, dp=dp, tp=tp, make_config=make_config, profile=profile
    )
    key = plain_key(kind, **sizes)
    programs = ProgramCache(
        model, num_pages=400 * dp, num_slots=key.rows * dp, window_len=max(8, key.length)
    )
    if is_guarded:
        return aot.inspect_program(lambda: programs.get(key, model.params))
    jitted = jax.jit(programs.function(key), donate_argnums=(2, 3, 4))
    lowered = jitted.lower(*programs.operands(key, model.params))
    return aot.inspect_program(lambda: lowered.compile({"xla_allow_excess_precision": False}))


def mixtral_step(kind: ProgramKind, *, tp: int = 1, **sizes) -> aot.CompiledProgram:
    """A step of two layers of Mixtral-8x7B."""
    model = abstract_model(2, tp=tp, make_config=mixtral)
    programs = programs_for(model, num_pages=400, num_slots=8)
    key = plain_key(kind, **sizes)
    return aot.inspect_program(lambda: programs.get(key, model.params))


FAMILIES = {
    "granite": {
        "vocab_size": 49155, "intermediate_size": 12800, "num_key_value_heads": 8,
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0,
        "attention_multiplier": 0.0078125, "tie_word_embeddings": True,
    },
    "smollm3": {"num_hidden_layers": 4},
    "phi3": {"sliding_window": 2047},
    "glm4": {},
    "olmo3": {"vocab_size": 100278, "num_hidden_layers": 4},
    "exaone4": {
        "hidden_size": 5120, "intermediate_size": 27392, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 4,
    },
    "gemma3_text": {
        "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
        "sliding_window": 1024, "hidden_act": "gelu_pytorch_tanh", "num_hidden_layers": 6,
    },
    "gpt_oss": {"num_local_experts": 32, "num_hidden_layers": 24},
    "ministral3": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "glm4_moe": {"head_dim": 128, "attention_bias": True},
    "gemma2": {
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
        "num_hidden_layers": 4,
    },
}  # fmt: skip
"""By family: what a published model has beside the family's defaults. Granite 3.1 8B, SmolLM3 3B,
Phi-3 mini, GLM-4 9B, OLMo 3 7B, EXAONE 4 32B, the text decoder of Gemma 3 27B, gpt-oss-20b; those
of Ministral 3 8B and Qwen3.5 9B; Gemma 2 9B; Qwen1.5-MoE-A2.7B, and that of Qwen3.5 35B-A3B;
Qwen3-Next 80B-A3B and GLM-4.5-Air."""


def last_layers(name: str) -> ModelConfig:
    """The last two layers of a published model of a family."""
    (family,) = (one for one in REGISTRY if one.name == name)
    config = config_from_hf({"architectures": list(family.architectures), **FAMILIES[name]})
    return config.with_layers([config.num_layers - 2, config.num_layers - 1])


def family_step(name: str, kind: ProgramKind, **sizes) -> aot.CompiledProgram:
    """A step of the last two layers of a published model: with and without a window, if any has."""
    model = abstract_model(2, make_config=lambda _: last_layers(name))
    programs = programs_for(model, num_pages=400, num_slots=8)
    key = plain_key(kind, **sizes)
    return aot.inspect_program(lambda: programs.get(key, model.params))


def narrow(num_layers: int) -> ModelConfig:
    """SmolLM2-135M, whose rows of 576 channels are no multiple of 128."""
    return dummy_config(
        num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576, intermediate_size=1536,
        vocab_size=49152, num_layers=num_layers,
    )  # fmt: skip


def pressed_draft(kind: ProgramKind, **sizes) -> aot.CompiledProgram:
    """A program of a draft model of the same shapes, on a device that is full."""
    model = abstract_model(2, PRESSED_BYTES)
    programs = ProgramCache(model, num_pages=400, num_slots=8, window_len=4, draft_model=model)
    if kind == "windows":
        key, params = plain_key(kind, **sizes), {**model.params, DRAFTS: model.params}
    else:
        key, params = plain_key(kind, mode="fast", weights="draft_model", **sizes), model.params
    return aot.inspect_program(lambda: programs.get(key, params))


def family_draft(name: str, **sizes) -> aot.CompiledProgram:
    """Drafts by the same layers as `family_step` has."""
    model = abstract_model(2, make_config=lambda _: last_layers(name))
    programs = ProgramCache(model, num_pages=400, num_slots=8, window_len=4, draft_model=model)
    key = plain_key("decode", mode="fast", weights="draft_model", **sizes)
    return aot.inspect_program(lambda: programs.get(key, model.params))


def pressed_head(
    kind: ProgramKind, *, weights: str, tp: int = 1, is_int8: bool = False, **sizes
) -> aot.CompiledProgram:
    """A program of an EAGLE-3 head with a vocabulary of its own, or one that leaves it features."""
    model = abstract_model(4, PRESSED_BYTES // tp, tp=tp)
    head = abstract_head(model, dummy_eagle(model.config, draft_vocab_size=32000))
    head = abstract_quantized_head(head) if is_int8 else head
    return head_program(model, head, kind, weights=weights, **sizes)


def mtp_program(kind: ProgramKind, *, weights: str, **sizes) -> aot.CompiledProgram:
    """The same of the MTP head of Qwen3.5 9B, beside the last two layers of that."""
    (family,) = (one for one in REGISTRY if one.name == "qwen3_5_text")
    assert family.mtp is not None
    # The embedding and the output matrix take 4 GB alone.
    memory = 3 * PRESSED_BYTES
    model = abstract_model(2, memory, make_config=lambda _: last_layers(family.name))
    head = abstract_mtp_head(model, family.mtp)
    return head_program(model, head, kind, weights=weights, **sizes)


def head_program(
    model: LoadedModel, head: DraftHead, kind: ProgramKind, *, weights: str, **sizes
) -> aot.CompiledProgram:
    """A program of a head, or with "full" weights one of the model that leaves it features."""
    num_slots = max(8, sizes["rows"])
    programs = ProgramCache(
        model, num_pages=400, num_slots=num_slots, window_len=max(4, sizes["length"]),
        draft_model=head,
    )  # fmt: skip
    mode: KernelMode = "invariant" if weights == "full" else "fast"
    key = plain_key(kind, mode=mode, weights=weights, leaves_features=weights == "full", **sizes)
    drafts = head.params_beside(model.params)
    params = model.params if weights == "full" else drafts
    if kind == "windows":
        params = {**model.params, DRAFTS: drafts}
    return aot.inspect_program(lambda: programs.get(key, params))


def narrow_windows(**sizes) -> aot.CompiledProgram:
    """Windows of SmolLM2-135M's shapes, drafted by a head of its own."""
    model = abstract_model(4, make_config=narrow)
    head = abstract_head(model, dummy_eagle(model.config, draft_vocab_size=32000))
    return head_program(model, head, "windows", weights="full", **sizes)


def choice(
    rows: int, *, length: int = 1, with_filters: bool = False, num_top: int = 0
) -> ChoiceKey:
    """The key of a choice program."""
    return ChoiceKey(rows=rows, length=length, with_filters=with_filters, num_top=num_top)


def pressed_choice(key: AnyKey, *, tp: int = 1) -> aot.CompiledProgram:
    """A program that follows a step of 8B shapes, of an engine with 256 slots."""
    model = abstract_model(2, PRESSED_BYTES // tp, tp=tp)
    programs = ProgramCache(model, num_pages=400, num_slots=256, window_len=8)
    return aot.inspect_program(lambda: programs.get(key, model.params))


def weight_window() -> aot.CompiledProgram:
    """32 MiB of a layer's largest matrix, as words."""
    run = functools.partial(
        device_hashing.window_of, num_units=896, window_units=device_hashing.WINDOW_UNITS
    )
    return aot.compile_program(run, _shape(2 * 14336, 4096), _shape(dtype=jnp.int32))


def weight_hash() -> aot.CompiledProgram:
    """A window of 32 MiB, hashed up to its units."""
    units = device_hashing.WINDOW_UNITS
    words = _shape(blake3.CHUNK_BYTES // 4, units * device_hashing.UNIT_CHUNKS, dtype=jnp.uint32)
    return aot.compile_program(device_hashing.hash_window, words, _shape(units, dtype=jnp.uint32))


def audit_windows() -> aot.CompiledProgram:
    """A step of an audit: 32 windows of 64 tokens, two layers, logits of every token."""
    model = abstract_model(2)
    key = plain_key("verify", rows=32, length=64, table_len=8)
    programs = ProgramCache(model, num_pages=512, num_slots=256, window_len=64)
    return aot.inspect_program(lambda: programs.get(key, model.params))


def kept_cache() -> aot.CompiledProgram:
    """A control: the cache is not donated, so a step that writes to it must copy it."""
    return aot.compile_program(lambda pages: pages.at[0, 0].set(1.0), _shape(2, 64, 2, 8, 128, 128))


def contractible() -> aot.CompiledProgram:
    """A control: a kernel whose product and sum name no rounding, so ptxas may fuse them.

    LLVM itself fuses those of one block.
    """

    def body(x, y, total):
        product = x[...] * y[...]
        total[...] = jax.lax.fori_loop(0, 1000, lambda _, z: z + product, y[...])

    row = _shape(128, dtype=jnp.float32)
    return aot.compile_program(plgpu.kernel(body, out_type=row), row, row)


def upstream(name: str, options: dict, *shapes) -> aot.CompiledProgram:
    """The step of a minimal program in docs/upstream, its first argument donated."""
    path = Path(__file__).parents[2] / "docs" / "upstream" / f"{name}.py"
    step = runpy.run_path(str(path))["step"]
    whole = NamedSharding(aot.h200_mesh(), P())
    donated = 0 if name == "rematerialization" else ()
    jitted = jax.jit(step, donate_argnums=donated, in_shardings=(whole,) * len(shapes))
    return aot.inspect_program(lambda: jitted.lower(*shapes).compile(options))


def upstream_slice(options: dict) -> aot.CompiledProgram:
    """A kernel of a slice that begins 12 bytes into its array."""
    return upstream("dynamic_slice_fusion", options, _shape(131, dtype=jnp.int32))


def upstream_rematerialization(options: dict) -> aot.CompiledProgram:
    """A read of a donated argument that moves behind its update where memory is short."""
    f32, width = jnp.float32, 1024
    shapes = (_shape(8, dtype=jnp.int32), _shape(8, width, dtype=f32))
    short = {"xla_gpu_memory_limit_slop_factor": 0}
    weights = [_shape(width, width, dtype=f32)] * 4
    return upstream("rematerialization", short | options, *shapes, weights)


PROGRAMS = {
    "qkv_8": lambda: qkv(8),
    "qkv_128": lambda: qkv(128),
    "qkv_4096": lambda: qkv(4096),
    "down_8": lambda: down(8),
    "down_4096": lambda: down(4096),
    "down_add_8": lambda: down_add(8),
    "w8a8_int8_1": lambda: w8a8(1, jnp.int8),
    "w8a8_float8_1": lambda: w8a8(1, jnp.float8_e4m3fn),
    "w8a8_int8_8": lambda: w8a8(8, jnp.int8),
    "w8a8_int8_4000": lambda: w8a8(4000, jnp.int8),
    "w8a8_float8_8": lambda: w8a8(8, jnp.float8_e4m3fn),
    "w8a8_float8_4000": lambda: w8a8(4000, jnp.float8_e4m3fn),
    "w8a8_float8_64": lambda: w8a8(64, jnp.float8_e4m3fn),
    **{
        f"w8a8_blocks_{n}": lambda n=n: w8a8(n, jnp.float8_e4m3fn, has_blocks=True)
        for n in (1, 8, 64, 128, 256, 4000)
    },
    "adapted_1": lambda: adapted(1),
    "adapted_64": lambda: adapted(64),
    "adapted_2048": lambda: adapted(2048),
    "norm_qkv_1": lambda: norm_qkv(1),
    "norm_qkv_8": lambda: norm_qkv(8),
    "norm_gate_up_8": lambda: norm_gate_up(8, 4096),
    "norm_gate_up_8_wide": lambda: norm_gate_up(8, 8192),
    "codes_int4_1": lambda: codes(1, CodeType.INT4),
    "codes_int4_2": lambda: codes(2, CodeType.INT4),
    "codes_int4_3": lambda: codes(3, CodeType.INT4),
    "codes_int4_4": lambda: codes(4, CodeType.INT4),
    "codes_int4_8": lambda: codes(8, CodeType.INT4),
    "codes_int8_1": lambda: codes(1, CodeType.INT8),
    "codes_int8_2": lambda: codes(2, CodeType.INT8),
    "codes_int8_4": lambda: codes(4, CodeType.INT8),
    "expert_rows_512": lambda: expert_rows(512),
    "expert_rows_32768": lambda: expert_rows(32768),
    "experts_1": lambda: experts(1),
    "experts_8": lambda: experts(8),
    "experts_64": lambda: experts(64),
    "experts_256": lambda: experts(256),
    "experts_4000": lambda: experts(4000),
    **{
        f"block_experts_{n}": lambda n=n: experts(n, OperandType.FLOAT8_BLOCKS)
        for n in (1, 8, 64, 256, 1000, 4000)
    },
    **{
        f"{kind.value}_experts_{n}": lambda n=n, kind=kind: experts(n, kind)
        for kind in (OperandType.INT8, OperandType.FLOAT8)
        for n in (8, 4000)
    },
    **{
        f"shared_experts_{kind.name.lower()}": lambda kind=kind: shared_experts(kind)
        for kind in OperandType
    },
    "expert_share_64": lambda: expert_share(64),
    "expert_share_4000": lambda: expert_share(4000),
    "attention_decode": lambda: attend(8, 1, 1024),
    "attention_decode_many": lambda: attend(64, 1, 1024),
    "attention_decode_long": lambda: attend(8, 1, 32768),
    "attention_verify_long": lambda: attend(8, 16, 32768),
    "new_token_long": lambda: attend_new(8, 32768),
    "new_token": lambda: attend_new(8, 1025),
    "new_token_one": lambda: attend_new(1, 1025),
    "new_token_many": lambda: attend_new(64, 1025),
    "attention_prefill": lambda: attend(1, 4096, 4096),
    "attention_prefill_256": lambda: attend(1, 4096, 4096, layout="gemma3_4b"),
    "attention_prefill_256_window": lambda: attend(1, 4096, 4096, layout="gemma3_4b", window=1024),
    "attention_prefill_256_softcap": lambda: attend(
        1, 4096, 8192, layout="gemma3_4b", window=4096, softcap=50.0
    ),
    "attention_window_256": lambda: attend(64, 1, 4096, layout="gemma3_4b", window=1024),
    "attention_decode_256": lambda: attend(8, 1, 1024, layout="gemma3_4b", softcap=50.0),
    "attention_verify_256": lambda: attend(8, 4, 1024, layout="qwen3_5_4b"),
    "new_token_256": lambda: attend_new(8, 1025, layout="gemma3_4b"),
    "new_token_256_one": lambda: attend_new(1, 2048, layout="qwen3_5_4b"),
    "new_token_256_many": lambda: attend_new(64, 1025, layout="qwen3_5_4b"),
    "float8_prefill": lambda: attend(1, 4096, 4096, profile=FLOAT8_CACHE),
    "float8_verify": lambda: attend(8, 16, 32768, profile=FLOAT8_CACHE),
    "float8_new_token": lambda: attend_new(8, 1025, profile=FLOAT8_CACHE),
    "float8_new_token_one": lambda: attend_new(1, 1025, profile=FLOAT8_CACHE),
    "float8_new_token_many": lambda: attend_new(64, 1025, profile=FLOAT8_CACHE),
    "decode_step": decode_step,
    "decode_launch": lambda: decode_launch("invariant", "full"),
    "draft_launch": lambda: decode_launch("fast", "int8"),
    "fast_step": lambda: fast_step("bfloat16"),
    "fast_step_int8": lambda: fast_step("int8"),
    "fast_step_float8": lambda: fast_step("float8_e4m3fn"),
    "kept_cache": kept_cache,
    "contractible": contractible,
    # Which way through attention: sequences, clusters, splits; a loop; the table where XLA could
    # hand a kernel its address.
    "pressed_sequences": lambda: pressed("decode", rows=64, table_len=32),
    "pressed_cluster": lambda: pressed("decode", rows=8, table_len=10),
    "pressed_splits": lambda: pressed("decode", rows=8, table_len=34),
    "pressed_wide": lambda: pressed("decode", rows=16, table_len=1024),
    "pressed_one": lambda: pressed("decode", rows=1, table_len=64),
    "pressed_loop": lambda: pressed("decode", rows=8, table_len=34, length=4),
    "pressed_draft_prefill": lambda: pressed_draft("prefill", rows=1, table_len=10, length=512),
    "pressed_draft_window": lambda: pressed_draft("decode", rows=8, table_len=10, length=3),
    "pressed_draft_windows": lambda: pressed_draft(
        "windows", rows=8, table_len=10, length=4, windows=8
    ),
    "pressed_draft_window_one": lambda: pressed_draft("decode", rows=1, table_len=34, length=5),
    "pressed_fast": lambda: pressed("decode", rows=8, table_len=34, mode="fast"),
    "pressed_features": lambda: pressed_head(
        "prefill", weights="full", rows=1, table_len=10, length=512
    ),
    "pressed_features_of_windows": lambda: pressed_head(
        "verify", weights="full", rows=8, table_len=10, length=4
    ),
    "pressed_head_prefill": lambda: pressed_head(
        "prefill", weights="eagle3", rows=1, table_len=10, length=512
    ),
    "pressed_head_window": lambda: pressed_head(
        "decode", weights="eagle3", rows=8, table_len=10, length=3
    ),
    "pressed_head_windows": lambda: pressed_head(
        "windows", weights="full", rows=8, table_len=10, length=4, windows=8
    ),
    "narrow_windows": lambda: narrow_windows(rows=8, table_len=5, length=5, windows=8),
    "pressed_head_window_one": lambda: pressed_head(
        "decode", weights="eagle3", rows=1, table_len=34, length=3
    ),
    "pressed_head_int8_prefill": lambda: pressed_head(
        "prefill", weights="eagle3", rows=1, table_len=10, length=512, is_int8=True
    ),
    "pressed_head_int8_window": lambda: pressed_head(
        "decode", weights="eagle3", rows=8, table_len=10, length=4, is_int8=True
    ),
    "pressed_head_int8_window_one": lambda: pressed_head(
        "decode", weights="eagle3", rows=1, table_len=34, length=4, is_int8=True
    ),
    "pressed_mtp_features": lambda: mtp_program(
        "prefill", weights="full", rows=1, table_len=10, length=512
    ),
    "pressed_mtp_features_of_windows": lambda: mtp_program(
        "verify", weights="full", rows=8, table_len=10, length=4
    ),
    "pressed_mtp_prefill": lambda: mtp_program(
        "prefill", weights="mtp", rows=1, table_len=10, length=512
    ),
    "pressed_mtp_window": lambda: mtp_program(
        "decode", weights="mtp", rows=8, table_len=10, length=3
    ),
    # Logits are left where they are made, or in the first rows of what a choice program reads.
    "pressed_leaves_logits": lambda: pressed("decode", rows=8, table_len=34, logit_rows=8),
    "pressed_leaves_few_logits": lambda: pressed("decode", rows=8, table_len=34, logit_rows=16),
    "pressed_verify_leaves_logits": lambda: pressed(
        "verify", rows=8, length=8, table_len=34, logit_rows=64
    ),
    "pressed_leaves_hidden": lambda: pressed(
        "prefill", rows=4, length=512, table_len=64, logit_rows=16, leaves_hidden=True
    ),
    "pressed_mesh_leaves_logits": lambda: pressed(
        "decode", rows=8, table_len=34, logit_rows=16, tp=4
    ),
    "behind_choice": lambda: pressed_choice(choice(16)),
    "behind_choice_filters": lambda: pressed_choice(choice(64, with_filters=True)),
    "behind_choice_top": lambda: pressed_choice(choice(16, with_filters=True, num_top=64)),
    "behind_choice_windows": lambda: pressed_choice(
        choice(8, length=8, with_filters=True, num_top=64)
    ),
    "behind_choice_mesh": lambda: pressed_choice(choice(16, with_filters=True, num_top=64), tp=4),
    "behind_install": lambda: pressed_choice(InstallKey(rows=4)),
    "pressed_scores": lambda: pressed_choice(
        ScoreKey(rows=4, length=512, mode="invariant", num_top=4)
    ),
    "pressed_mesh_scores": lambda: pressed_choice(
        ScoreKey(rows=1, length=512, mode="invariant", num_top=64), tp=4
    ),
    "pressed_prefill": lambda: pressed("prefill", rows=1, length=512, table_len=64),
    "pressed_prefill_many": lambda: pressed("prefill", rows=8, length=512, table_len=34),
    "pressed_verify": lambda: pressed("verify", rows=8, length=8, table_len=34),
    "pressed_verify_wide": lambda: pressed("verify", rows=1, length=32, table_len=64),
    "audit_windows": audit_windows,
    "weight_window": weight_window,
    "weight_hash": weight_hash,
    "narrow_200": lambda: pressed("decode", rows=200, table_len=4, make_config=narrow),
    "narrow_verify": lambda: pressed("verify", rows=8, length=8, table_len=8, make_config=narrow),
    "narrow_prefill": lambda: pressed(
        "prefill", rows=1, length=200, table_len=4, make_config=narrow
    ),
    "pressed_experts_one": lambda: pressed("decode", rows=1, table_len=10, make_config=qwen3_moe),
    "pressed_experts": lambda: pressed("decode", rows=64, table_len=10, make_config=qwen3_moe),
    "pressed_experts_prefill": lambda: pressed(
        "prefill", rows=1, length=512, table_len=64, make_config=qwen3_moe
    ),
    "pressed_experts_mesh": lambda: pressed(
        "decode", rows=8, table_len=34, tp=4, make_config=qwen3_moe
    ),
    "pressed_experts_mesh_prefill": lambda: pressed(
        "prefill", rows=1, length=512, table_len=64, tp=4, make_config=qwen3_moe
    ),
    "granite_decode": lambda: family_step("granite", "decode", rows=8, table_len=10),
    "smollm3_decode": lambda: family_step("smollm3", "decode", rows=8, table_len=10),
    "phi3_decode": lambda: family_step("phi3", "decode", rows=8, table_len=10),
    "glm4_decode": lambda: family_step("glm4", "decode", rows=8, table_len=10),
    "glm4_prefill": lambda: family_step("glm4", "prefill", rows=1, length=512, table_len=64),
    "olmo3_decode": lambda: family_step("olmo3", "decode", rows=8, table_len=10),
    "olmo3_prefill": lambda: family_step("olmo3", "prefill", rows=1, length=512, table_len=64),
    "exaone4_decode": lambda: family_step("exaone4", "decode", rows=8, table_len=10),
    "gemma3_decode": lambda: family_step("gemma3_text", "decode", rows=8, table_len=10),
    "ministral3_decode": lambda: family_step("ministral3", "decode", rows=8, table_len=10),
    "ministral3_verify": lambda: family_step(
        "ministral3", "verify", rows=8, length=4, table_len=10
    ),
    "ministral3_prefill": lambda: family_step(
        "ministral3", "prefill", rows=1, length=512, table_len=64
    ),
    "qwen2_moe_decode": lambda: family_step("qwen2_moe", "decode", rows=8, table_len=10),
    "qwen35_moe_decode": lambda: family_step("qwen3_5_moe_text", "decode", rows=8, table_len=10),
    "qwen35_moe_prefill": lambda: family_step(
        "qwen3_5_moe_text", "prefill", rows=1, length=512, table_len=64
    ),
    "qwen3_next_decode": lambda: family_step("qwen3_next", "decode", rows=8, table_len=10),
    "qwen3_next_prefill": lambda: family_step(
        "qwen3_next", "prefill", rows=1, length=512, table_len=64
    ),
    "glm4_moe_decode": lambda: family_step("glm4_moe", "decode", rows=8, table_len=10),
    "glm4_moe_prefill": lambda: family_step(
        "glm4_moe", "prefill", rows=1, length=512, table_len=64
    ),
    "gpt_oss_decode_one": lambda: family_step("gpt_oss", "decode", rows=1, table_len=10),
    "gpt_oss_decode": lambda: family_step("gpt_oss", "decode", rows=8, table_len=10),
    "gpt_oss_decode_many": lambda: family_step("gpt_oss", "decode", rows=64, table_len=10),
    "gpt_oss_prefill": lambda: family_step("gpt_oss", "prefill", rows=1, length=512, table_len=64),
    "gemma2_decode": lambda: family_step("gemma2", "decode", rows=8, table_len=10),
    "gemma2_verify": lambda: family_step("gemma2", "verify", rows=8, length=4, table_len=10),
    "gemma2_prefill": lambda: family_step("gemma2", "prefill", rows=1, length=512, table_len=64),
    "qwen35_decode_one": lambda: family_step("qwen3_5_text", "decode", rows=1, table_len=10),
    "qwen35_decode": lambda: family_step("qwen3_5_text", "decode", rows=8, table_len=10),
    "qwen35_decode_many": lambda: family_step("qwen3_5_text", "decode", rows=64, table_len=10),
    "qwen35_verify": lambda: family_step("qwen3_5_text", "verify", rows=8, length=4, table_len=10),
    "qwen35_prefill": lambda: family_step(
        "qwen3_5_text", "prefill", rows=1, length=4096, table_len=64
    ),
    "qwen35_draft_window": lambda: family_draft("qwen3_5_text", rows=1, table_len=10, length=4),
    "gemma3_draft_window": lambda: family_draft("gemma3_text", rows=1, table_len=10, length=4),
    "gemma3_prefill": lambda: family_step(
        "gemma3_text", "prefill", rows=1, length=512, table_len=64
    ),
    "mixtral_decode": lambda: mixtral_step("decode", rows=8, table_len=10),
    "mixtral_decode_one": lambda: mixtral_step("decode", rows=1, table_len=10),
    "mixtral_decode_many": lambda: mixtral_step("decode", rows=64, table_len=10),
    "mixtral_prefill": lambda: mixtral_step("prefill", rows=1, length=512, table_len=64),
    "mixtral_mesh": lambda: mixtral_step("decode", rows=8, table_len=10, tp=2),
    "mixtral_mesh_many": lambda: mixtral_step("decode", rows=64, table_len=10, tp=2),
    "mixtral_mesh_prefill": lambda: mixtral_step("prefill", rows=1, length=512, table_len=64, tp=2),
    "pressed_mesh_decode": lambda: pressed("decode", rows=8, table_len=34, tp=4),
    "pressed_mesh_many": lambda: pressed("decode", rows=256, table_len=10, dp=2, tp=2),
    "pressed_mesh_prefill": lambda: pressed("prefill", rows=1, length=512, table_len=64, tp=4),
    "pressed_mesh_fast": lambda: pressed("decode", rows=8, table_len=34, tp=4, mode="fast"),
    "pressed_mesh_head_window": lambda: pressed_head(
        "decode", weights="eagle3", rows=8, table_len=10, length=3, tp=2
    ),
    "pressed_mesh_features": lambda: pressed_head(
        "prefill", weights="full", rows=1, table_len=10, length=512, tp=2
    ),
    "float32_decode": lambda: pressed("decode", rows=8, table_len=9, profile=FLOAT32),
    "float32_decode_many": lambda: pressed("decode", rows=64, table_len=9, profile=FLOAT32),
    "float32_prefill": lambda: pressed(
        "prefill", rows=1, length=1000, table_len=9, profile=FLOAT32
    ),
    "float32_verify": lambda: pressed("verify", rows=8, length=8, table_len=34, profile=FLOAT32),
    "float32_mesh_decode": lambda: pressed(
        "decode", rows=8, table_len=9, dp=2, tp=2, profile=FLOAT32
    ),
    "float32_mesh_many": lambda: pressed("decode", rows=256, table_len=10, tp=4, profile=FLOAT32),
    "float32_mesh_prefill": lambda: pressed(
        "prefill", rows=1, length=1000, table_len=9, tp=2, profile=FLOAT32
    ),
    "upstream_slice": lambda: upstream_slice({}),
    "upstream_slice_off": lambda: upstream_slice(IN_PLACE_OPTIONS),
    "upstream_rematerialization": lambda: upstream_rematerialization({}),
    "upstream_rematerialization_off": lambda: upstream_rematerialization(IN_PLACE_OPTIONS),
    "unguarded_splits": lambda: pressed("decode", rows=8, table_len=34, is_guarded=False),
    "unguarded_prefill": lambda: pressed(
        "prefill", rows=1, length=512, table_len=64, is_guarded=False
    ),
}


if __name__ == "__main__":
    aot.start()
    program = PROGRAMS[sys.argv[1]]()
    report = {
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
        "waiting": [kernel.name for kernel in program.kernels if kernel.waits_for_wgmma],
        "copies": program.copies(least_bytes=LARGE_BYTES),
        "temp_bytes": program.temp_bytes,
        "clones": program.num_clones,
        "faults": program.faults(),
        "float_arithmetic": program.float_arithmetic(),
        "launches": program.hlo.count('custom_call_target="mosaic_gpu_v2"'),
        "xla_launches": len(
            re.findall(r" (?:fusion|copy)\(", program.hlo.partition("\nENTRY ")[2])
        ),
    }
    print(json.dumps(report))
