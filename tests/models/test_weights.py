# SPDX-License-Identifier: Apache-2.0
"""Weights arrive bit for bit on every mesh, or are refused with a message that names the file."""

import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from detjax.models.config import ModelConfig, RopeConfig
from detjax.models.hf_config import load_config
from detjax.models.params import (
    by_param,
    kv_layout,
    param_specs,
    possible_tps,
    tensor_specs,
)
from detjax.models.weights import files
from detjax.models.weights import load as weights_load
from detjax.models.weights import reading as weights_reading
from detjax.models.weights.assemble import dismantle
from detjax.models.weights.dtypes import find_cast
from detjax.models.weights.load import load_params
from detjax.models.weights.place import place_tensor
from detjax.models.weights.random_weights import random_params
from detjax.models.weights.reading import readings
from detjax.models.weights.write import write_weights
from detjax.parallel.mesh import make_mesh
from detjax.testing.cases import quick_and_slow

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(
    folder.name
    for folder in GOLDEN.iterdir()
    if (folder / "config.json").is_file() and not readings(load_config(folder), "float32")
)
"""Those that store what the decoder reads; test_reading.py has the others."""

BLOCK = 16
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

CONFIG = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=10000.0),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    qkv_bias=True,
    o_bias=True,
    qk_norm=True,
    sliding_windows=(None, None),
    bos_token_id=None,
    eos_token_ids=(2,),
)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)


def mesh_of(dp: int, tp: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (dp, tp),
        ("dp", "tp"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: dp * tp],
    )


def random_tensors(config: ModelConfig, *, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    """A whole checkpoint: a wide range of exponents, both zeros."""
    rng = np.random.default_rng(0)
    tensors = {}
    for spec in jax.tree.leaves(tensor_specs(config, tp=1, vocab_block=1)):
        values = rng.standard_normal(spec.hf_shape) * 2.0 ** rng.integers(-8, 8, spec.hf_shape)
        values.flat[:3] = 0.0, -0.0, 2.0**-24
        tensors[spec.hf_name] = values.astype(jnp.dtype(dtype))
    return tensors


def write_folder(folder: Path, tensors: dict[str, np.ndarray], *, num_files: int = 1) -> Path:
    """Write tensors as one file, or as several with an index."""
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
    file_of = {name: names[i % num_files] for i, name in enumerate(tensors)}
    for file in names:
        save_file({k: v for k, v in tensors.items() if file_of[k] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(folder: Path, config=CONFIG, *, dp=1, tp=1, dtype="bfloat16", block=BLOCK, **keys):
    return load_params(folder, config, mesh_of(dp, tp), dtype=dtype, vocab_block=block, **keys)


def raw(array) -> np.ndarray:
    """The bits of an array, as unsigned integers."""
    array = np.asarray(array)
    return array.reshape(-1).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def assert_same_bits(actual, expected) -> None:
    """Same structure, shapes, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        assert (a.shape, a.dtype) == (e.shape, e.dtype), path
        assert (raw(a) == raw(e)).all(), path


def expected_params(config: ModelConfig, tensors: dict, *, tp: int, dtype, block=BLOCK):
    """What loading must give, by indexing whole tensors on the host."""
    layout = kv_layout(config.num_heads, config.num_kv_heads, tp)

    def heads(tensor: np.ndarray) -> np.ndarray:
        split = tensor.reshape(config.num_kv_heads, config.head_dim, *tensor.shape[1:])
        return split[list(layout.heads)].reshape(-1, *tensor.shape[1:])

    def expected(path, spec) -> np.ndarray:
        tensor = np.stack([tensors[name] for name in spec.hf_names]).astype(jnp.dtype(dtype))
        tensor = tensor if spec.num_experts else tensor[0]
        key = path[-1].key
        if key in ("k", "v", "k_bias", "v_bias"):
            return heads(tensor)
        if key in ("lm_head", "router", "shared_gate"):
            multiple = tp * block if key == "lm_head" else 64
            padding = np.zeros((-len(tensor) % multiple, tensor.shape[1]), tensor.dtype)
            return np.concatenate([tensor, padding])
        return tensor

    def joined(parts: tuple[np.ndarray, ...]) -> np.ndarray:
        """Of each rank its rows of every part; of each expert its gate and up."""
        if parts[0].ndim == 3:
            return np.concatenate(parts, axis=1)
        by_rank = [np.split(part, tp) for part in parts]
        return np.concatenate([part for rank in zip(*by_rank, strict=True) for part in rank])

    specs = tensor_specs(config, tp=tp, vocab_block=block)
    tensors_as_stored = by_param(jax.tree.map_with_path(expected, specs))
    return jax.tree.map(
        lambda parts: joined(parts) if len(parts) > 1 else parts[0],
        tensors_as_stored,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def separated(params, config: ModelConfig, *, tp: int, block: int = BLOCK):
    """The tensors that parameters are made of, by name, as their specs store them."""
    specs = param_specs(config, tp=tp, vocab_block=block)
    found = dismantle(params, specs, mesh_of(1, tp))
    return [(spec, np.asarray(array)) for spec, array in found]


# ------------------------------------------------------------------------------ what is loaded


@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_bits_are_those_of_the_file_on_every_mesh(tmp_path, dp, tp, tied):
    config = TIED if tied else CONFIG
    tensors = random_tensors(config)
    params = load(write_folder(tmp_path, tensors), config, dp=dp, tp=tp)
    assert_same_bits(params, expected_params(config, tensors, tp=tp, dtype="bfloat16"))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8])
def test_key_value_heads_are_repeated_as_the_layout_says(tmp_path, num_kv_heads, tp):
    config = dataclasses.replace(CONFIG, num_heads=24, num_kv_heads=num_kv_heads, num_layers=1)
    tensors = random_tensors(config)
    params = load(write_folder(tmp_path, tensors), config, tp=tp)
    assert_same_bits(params, expected_params(config, tensors, tp=tp, dtype="bfloat16"))
    layout = kv_layout(24, num_kv_heads, tp)
    name = "model.layers.0.self_attn.k_proj.weight"
    (key,) = (a for spec, a in separated(params, config, tp=tp) if spec.hf_name == name)
    key, whole = key.reshape(layout.num_slots, 4, 32), tensors[name].reshape(num_kv_heads, 4, 32)
    for head in range(24):
        assert (raw(key[head // layout.group]) == raw(whole[head * num_kv_heads // 24])).all()


@pytest.mark.parametrize("case", CASES)
def test_golden_folders_load(case):
    config = load_config(GOLDEN / case)
    tp = possible_tps(config)[-1]
    tensors = load_file(GOLDEN / case / "model.safetensors")
    params = load(GOLDEN / case, config, tp=tp, dtype="float32", block=128)
    expected = expected_params(config, tensors, tp=tp, dtype="float32", block=128)
    assert_same_bits(params, expected)


@pytest.mark.parametrize("num_files", [2, 5])
def test_files_with_an_index_load_like_one_file(tmp_path, num_files):
    tensors = random_tensors(CONFIG)
    params = load(write_folder(tmp_path, tensors, num_files=num_files), dp=2, tp=2)
    assert_same_bits(params, expected_params(CONFIG, tensors, tp=2, dtype="bfloat16"))


def test_every_parameter_is_split_as_its_spec_says(tmp_path):
    mesh = mesh_of(2, 4)
    folder = write_folder(tmp_path, random_tensors(CONFIG))
    params = load_params(folder, CONFIG, mesh, dtype="bfloat16", vocab_block=BLOCK)
    specs = param_specs(CONFIG, tp=4, vocab_block=BLOCK)
    for array, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True):
        assert array.sharding == NamedSharding(mesh, spec.partition), spec


# ---------------------------------------------------------------------------- tied embeddings


@pytest.mark.slow
def test_weights_that_no_gpu_holds_are_refused_before_one_is_read(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, random_tensors(CONFIG))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(load(folder)))
    monkeypatch.setattr(weights_load, "memory_limit", lambda devices: size)
    load(folder)
    monkeypatch.setattr(weights_load, "memory_limit", lambda devices: size - 1)
    read = []
    monkeypatch.setattr(weights_load, "place_stored", lambda *args, **keys: read.append(args))
    with pytest.raises(ValueError, match="at tp=1, and JAX has .* use more GPUs"):
        load(folder)
    assert not read


def test_tied_head_is_the_very_array_of_the_embeddings_on_one_rank(tmp_path):
    folder = write_folder(tmp_path, random_tensors(TIED))
    params = load(folder, TIED)
    assert params["lm_head"] is params["embed"]
    replicated = load(folder, TIED, dp=2)
    assert replicated["lm_head"] is replicated["embed"]
    random = random_params(SHARED, mesh_of(1, 1), seed=0, dtype="float32", vocab_block=BLOCK)
    assert random["lm_head"] is random["embed"]


def test_tied_head_is_another_array_where_its_layout_differs(tmp_path):
    folder = write_folder(tmp_path, random_tensors(TIED))
    padded = load(folder, TIED, block=64)
    assert padded["lm_head"].shape == (128, 32)
    assert padded["embed"].shape == (96, 32)
    split = load(folder, TIED, tp=2)
    assert split["lm_head"] is not split["embed"]
    assert (raw(split["lm_head"]) == raw(split["embed"])).all()


def test_tied_checkpoint_may_carry_an_equal_head(tmp_path):
    tensors = random_tensors(TIED)
    folder = write_folder(tmp_path, {**tensors, HEAD: tensors[EMBED].copy()})
    params = load(folder, TIED)
    assert params["lm_head"] is params["embed"]


def test_tied_checkpoint_with_another_head_is_refused(tmp_path):
    tensors = random_tensors(TIED)
    head = tensors[EMBED].copy()
    head[95, 31] += 1
    folder = write_folder(tmp_path, {**tensors, HEAD: head})
    with pytest.raises(
        ValueError, match=r"model.safetensors holds a 'lm_head.weight' that differs"
    ):
        load(folder, TIED)


# -------------------------------------------------------------------------------------- dtypes


def test_float32_is_rounded_to_nearest_even_bfloat16(tmp_path):
    tensors = random_tensors(CONFIG, dtype="float32")
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000], np.uint32)
    tensors["model.norm.weight"][:5] = ties.view(np.float32)
    params = load(write_folder(tmp_path, tensors))
    expected_ties = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80]
    assert raw(params["final_norm"])[:5].tolist() == expected_ties
    for name, array in (("embed", EMBED), ("lm_head", HEAD)):
        bits = tensors[array].view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        assert (raw(params[name]) == rounded).all()


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_every_source_becomes_float32_exactly(tmp_path, source):
    tensors = random_tensors(CONFIG, dtype=source)
    params = load(write_folder(tmp_path, tensors), dtype=jnp.float32)
    for name in ("embed", "lm_head"):
        wide = np.asarray(params[name])
        assert wide.dtype == np.float32
        source_tensor = tensors[{"embed": EMBED, "lm_head": HEAD}[name]]
        assert (raw(wide.astype(source_tensor.dtype)) == raw(source_tensor)).all()
        assert (wide.astype(np.float64) == source_tensor.astype(np.float64)).all()


def test_float16_to_bfloat16_is_refused(tmp_path):
    folder = write_folder(tmp_path, random_tensors(CONFIG, dtype="float16"))
    with pytest.raises(ValueError, match=r"is float16, whose 11 .*Ask for dtype float32"):
        load(folder)

    with pytest.raises(ValueError, match=r"--cast-weights bfloat16, load_model\(cast_weights='bfl"):
        load(folder)


# ---------------------------------------------------------------------------------------- casts


def rounded_bits(wide: np.ndarray) -> np.ndarray:
    """Bits of float32 values as bfloat16, to nearest and ties to even, in integers alone."""
    bits = wide.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(half_bits: np.ndarray) -> np.ndarray:
    """float32 of float16 bits, by the definition of the format."""
    sign = np.where(half_bits >> 15, -1.0, 1.0)
    exponent, mantissa = (half_bits >> 10) & 31, (half_bits & 1023).astype(np.float64)
    normal = np.ldexp(1 + mantissa / 1024, exponent.astype(np.int32) - 15)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -24), normal)
    magnitude = np.where(exponent == 31, np.inf, magnitude)
    return (sign * magnitude).astype(np.float32)


def test_a_cast_rounds_every_float16_to_the_nearest_bfloat16(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=2048)
    tensors = random_tensors(config, dtype="float16")
    patterns = np.arange(2**16, dtype=np.uint16)
    patterns[((patterns & 0x7C00) == 0x7C00) & ((patterns & 0x3FF) != 0)] = 0  # NaN has no bits
    tensors[EMBED] = patterns.view(np.float16).reshape(2048, 32)
    params = load(write_folder(tmp_path, tensors), config, cast_weights="bfloat16")
    wide = widened(patterns)
    assert (raw(params["embed"]).ravel() == rounded_bits(wide)).all()
    assert (raw(params["embed"]) == raw(tensors[EMBED].astype(jnp.bfloat16))).all()
    is_exact = params["embed"].astype(jnp.float32).ravel() == wide
    assert 0.1 < np.mean(is_exact) < 0.2, "an eighth of the patterns have three zeros at the end"
    truncated = (wide.view(np.uint32) >> 16).astype(np.uint16)
    assert (rounded_bits(wide) != truncated).any(), "another rounding would be seen"
    subnormal = (patterns & 0x7C00 == 0) & (patterns & 0x3FF != 0)
    assert np.isfinite(wide[subnormal]).all() and (np.asarray(is_exact)[subnormal]).any()
    assert (raw(params["embed"]).ravel()[subnormal] & 0x7F80 != 0).all(), "normal numbers now"


@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp", "num_files"), [(1, 1, 3), (2, 4, 3), (1, 8, 1)])
def test_cast_weights_have_the_same_bits_on_every_mesh_and_in_shards(tmp_path, dp, tp, num_files):
    tensors = random_tensors(CONFIG, dtype="float16")
    folder = write_folder(tmp_path, tensors, num_files=num_files)
    params = load(folder, dp=dp, tp=tp, cast_weights="bfloat16")
    assert_same_bits(params, expected_params(CONFIG, tensors, tp=tp, dtype="bfloat16"))


def test_float32_subnormals_are_rounded_and_what_would_overflow_is_refused(tmp_path):
    tensors = random_tensors(CONFIG, dtype="float32")
    largest = 0x7F7F7FFF  # rounds down to the largest bfloat16; the next one to infinity
    bits = np.array([0x00000001, 0x00008001, 0x80018000, largest, 0x7F800000], np.uint32)
    tensors["model.norm.weight"][:5] = bits.view(np.float32)
    folder = write_folder(tmp_path, tensors)
    for cast in ("none", "bfloat16"):
        params = load(folder, cast_weights=cast)
        expected = [0x0000, 0x0001, 0x8002, 0x7F7F, 0x7F80]
        assert raw(params["final_norm"])[:5].tolist() == expected
    tensors["model.norm.weight"][3] = np.uint32(largest + 1).view(np.float32)
    with pytest.raises(
        ValueError, match=r"'model.norm.weight' in .* holds a finite value that would beco"
    ):
        load(write_folder(tmp_path, tensors), cast_weights="bfloat16")


@pytest.mark.parametrize(
    ("sources", "name"),
    [
        (("float16",), "float16 to bfloat16"),
        (("float32",), "float32 to bfloat16"),
        (("bfloat16", "float16"), "float16 to bfloat16"),
        (("bfloat16", "float32", "float16"), "float16 and float32 to bfloat16"),
    ],
)
def test_a_cast_is_named_after_what_it_rounds(tmp_path, sources, name):
    tensors = random_tensors(CONFIG)
    for i, (key, tensor) in enumerate(tensors.items()):
        tensors[key] = tensor.astype(jnp.dtype(sources[i % len(sources)]))
    folder = write_folder(tmp_path, tensors, num_files=2)
    assert find_cast(folder, CONFIG, cast_weights="bfloat16", dtype="bfloat16") == name
    assert find_cast(folder, CONFIG, cast_weights="none", dtype="bfloat16") == "none"
    params = load(folder, tp=2, cast_weights="bfloat16")
    assert_same_bits(params, expected_params(CONFIG, tensors, tp=2, dtype="bfloat16"))


def test_a_tensor_that_is_not_read_is_not_cast(tmp_path):
    tensors = random_tensors(CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float16)
    with pytest.raises(ValueError, match=r"nothing to convert: the weights in .* are bfloat16; le"):
        find_cast(
            write_folder(tmp_path, tensors), CONFIG, cast_weights="bfloat16", dtype="bfloat16"
        )


@pytest.mark.parametrize(
    ("cast_weights", "dtype", "says"),
    [
        ("bfloat16", "float32", "--cast-weights bfloat16 does not go with float32 weights, which"),
        ("float16", "bfloat16", "cast_weights='float16' must be one of"),
        ("", "bfloat16", "cast_weights='' must be one of"),
    ],
)
def test_casts_that_make_no_sense_are_refused(tmp_path, cast_weights, dtype, says):
    folder = write_folder(tmp_path, random_tensors(CONFIG, dtype="float16"))
    with pytest.raises(ValueError, match=says):
        find_cast(folder, CONFIG, cast_weights=cast_weights, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_other_target_dtypes_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"dtype={dtype} is not supported; use bfloat16 or flo"):
        load(tmp_path, dtype=dtype)


def test_quantised_tensors_are_refused(tmp_path):
    tensors = random_tensors(CONFIG)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.zeros(tensors[name].shape, np.int8)
    with pytest.raises(ValueError, match=rf"'{name}' in .* is I8, which is not supported"):
        load(write_folder(tmp_path, tensors))


# -------------------------------------------------------------------------------------- memory


class CountingRows:
    """The rows of a stored tensor, which record what is read of them."""

    def __init__(self, rows, name: str, reads: list):
        self.rows, self.name, self.reads = rows, name, reads

    def __getitem__(self, index):
        read = self.rows[index]
        self.reads.append((self.name, str(index), read.size))
        return read


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 4), (4, 2)])
def test_each_shard_is_read_once_and_nothing_larger(tmp_path, monkeypatch, dp, tp):
    reads = []

    def counting_open(folder, stack):
        return {
            name: dataclasses.replace(tensor, rows=CountingRows(tensor.rows, name, reads))
            for name, tensor in files.open_tensors(folder, stack).items()
        }

    monkeypatch.setattr(weights_reading, "open_tensors", counting_open)
    folder = write_folder(tmp_path, random_tensors(CONFIG))
    load(folder, dp=dp, tp=tp)
    counts = Counter((name, index) for name, index, _ in reads)
    for spec in jax.tree.leaves(tensor_specs(CONFIG, tp=tp, vocab_block=BLOCK)):
        sizes = [size for name, _, size in reads if name == spec.hf_name]
        is_split = "tp" in spec.partition
        shard_size = int(np.prod(spec.shape)) // (tp if is_split else 1)
        assert max(sizes) <= shard_size, spec.hf_name
        if spec.is_rearranged:
            continue  # a repeated head is read once a slot, padding not at all
        assert {n for (name, _), n in counts.items() if name == spec.hf_name} == {1}
        assert sum(sizes) == int(np.prod(spec.shape)), spec.hf_name


def test_progress_counts_bytes_up_to_the_total(tmp_path):
    calls = []
    folder = write_folder(tmp_path, random_tensors(CONFIG))
    params = load(folder, tp=2, progress=lambda *call: calls.append(call))
    total = sum(array.nbytes for array in jax.tree.leaves(params))
    assert len(calls) == len(jax.tree.leaves(tensor_specs(CONFIG, tp=2, vocab_block=BLOCK)))
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1] == total
    assert {call[2] for call in calls} == {total}
    assert calls[0][0] == EMBED


def test_progress_reaches_the_total_when_the_head_is_shared(tmp_path):
    calls = []
    folder = write_folder(tmp_path, random_tensors(TIED))
    load(folder, TIED, progress=lambda *call: calls.append(call))
    assert calls[-1][1] == calls[-1][2]


# ----------------------------------------------------------------------------- what is refused


def test_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors nor .*convert"):
        load(tmp_path)


def test_missing_tensor_is_refused(tmp_path):
    tensors = random_tensors(CONFIG)
    del tensors["model.layers.1.self_attn.k_proj.bias"], tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"lacks 2 of 33 tensors, such as 'model.*config.json and"):
        load(write_folder(tmp_path, tensors))


def test_unexpected_tensor_is_refused(tmp_path):
    tensors = random_tensors(CONFIG)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    with pytest.raises(ValueError, match=r"holds 'model.layers.2.mlp.*which this model has no pla"):
        load(write_folder(tmp_path, tensors))


def test_inert_tensors_are_allowed(tmp_path):
    tensors = random_tensors(CONFIG)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    params = load(write_folder(tmp_path, {**tensors, **extra}))
    assert_same_bits(params, expected_params(CONFIG, tensors, tp=1, dtype="bfloat16"))


@pytest.mark.parametrize("shape", [(49, 32), (32, 48), (48, 32, 1), (48 * 32,)])
def test_wrong_shape_is_refused(tmp_path, shape):
    tensors = random_tensors(CONFIG)
    tensors["model.layers.0.mlp.gate_proj.weight"] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.gate_proj.weight' in .* has shape"):
        load(write_folder(tmp_path, tensors))


@pytest.mark.parametrize("damage", ["truncated", "longer", "header", "empty", "folder"])
def test_damaged_file_is_refused(tmp_path, damage):
    path = write_folder(tmp_path, random_tensors(CONFIG)) / "model.safetensors"
    content = path.read_bytes()
    damaged = {
        "truncated": content[:-1],
        "longer": content + b"\0",
        "header": b"\xff" * 64 + content[64:],
        "empty": b"",
    }
    if damage == "folder":
        path.unlink()
        path.mkdir()
        with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
            load(tmp_path)
        return
    path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or cut short .*download"):
        load(tmp_path)


HEADER = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def header_of(shape: list, *offsets: int) -> str:
    return json.dumps(HEADER | {"shape": shape, "data_offsets": offsets})


@pytest.mark.parametrize(
    "header",
    [
        f'{{"a": {header_of([2], 0, 8)}, "b": {header_of([2], 0, 8)}}}',  # one on the other
        f'{{"a": {header_of([2], 0, 8)}, "b": {header_of([2], 4, 12)}}}',
        f'{{"a": {header_of([2], 8, 16)}}}',  # a hole before it
        f'{{"a": {header_of([2], 8, 0)}}}',
        f'{{"a": {header_of([2**62, 2**62], 0, 8)}}}',
        f'{{"a": {header_of([2**70], 0, 8)}}}',
        f'{{"a": {header_of([-2], 0, 8)}}}',
        f'{{"a": {header_of([2], 0, 2**64)}}}',
        f'{{"a": {header_of([2], 0, 8)}, "a": {header_of([2], 0, 8)}}}',  # safetensors takes it
        f'{{"a": {header_of([0], 0, 0)}, "a": {header_of([2], 0, 8)}}}',
        "[" * 100_000,
    ],
)
def test_absurd_headers_are_refused(tmp_path, header):
    content = len(header).to_bytes(8, "little") + header.encode() + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged.*download it again"):
        load(tmp_path)


def test_a_header_that_is_longer_than_any_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write_folder(tmp_path, random_tensors(CONFIG), num_files=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name, file = next(iter(index["weight_map"].items()))
    (other,) = set(index["weight_map"].values()) - {file}
    tensors = load_file(tmp_path / other)
    save_file(tensors | {name: load_file(tmp_path / file)[name]}, tmp_path / other)
    with pytest.raises(ValueError, match=f"both hold {name!r}"):
        load(tmp_path)


def test_files_that_are_links_load_as_in_hugging_faces_cache(tmp_path):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    write_folder(blobs, random_tensors(CONFIG), num_files=2)
    folder.mkdir(parents=True)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(Path("../../blobs") / path.name)
    assert set(load(folder)) == set(load(blobs))


def test_missing_shard_file_is_refused(tmp_path):
    write_folder(tmp_path, random_tensors(CONFIG), num_files=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"00002-of-00003.safetensors is named in .*index"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "index.json is not a safetensors index"),
        ("{}", "index.json is not a safetensors index"),
        ('{"weight_map": 3}', "index.json is not a safetensors index"),
        ('{"weight_map": {"a": "../a.safetensors"}}', r"names '../a.safetensors', which is not a"),
        ('{"weight_map": {"a": "/etc/passwd"}}', r"names '/etc/passwd', which is not a"),
        ('{"weight_map": {"a": "b/../../c"}}', r"names 'b/../../c', which is not a"),
        ("[" * 100_000, "index.json is not a safetensors index"),
        ('{"weight_map": {"a": 1}}', "names 1, which is not a file in the same folder"),
    ],
)
def test_broken_index_is_refused(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_index_that_contradicts_its_files_is_refused(tmp_path):
    write_folder(tmp_path, random_tensors(CONFIG), num_files=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = json.loads(path.read_text())
    moved["weight_map"][EMBED] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(moved))
    with pytest.raises(ValueError, match=r"holds 'model.embed_tokens.weight', which .* places in"):
        load(tmp_path)
    index["weight_map"]["model.absent"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"places 'model.absent' in .*, which lacks it; download"):
        load(tmp_path)


def test_mesh_that_does_not_fit_is_refused(tmp_path):
    config = dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"tp=4 must divide num_heads=6; .*\(1, 2\)"):
        load(tmp_path, config, tp=4)


# ------------------------------------------------------------------------------ random weights


SMALL = dataclasses.replace(
    TIED, num_layers=1, num_kv_heads=1, vocab_size=90, o_bias=False, qk_norm=False
)
SHARED = dataclasses.replace(SMALL, vocab_size=96)
"""Whole vocabulary blocks, so that one array is the embeddings and the head."""


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp"), [(2, 4), (2, 1), (1, 8)])
@pytest.mark.parametrize("dtype", quick_and_slow(["bfloat16"], ["float32"]))
def test_random_weights_have_the_same_values_on_every_mesh(random_tensors_of, dp, tp, dtype):
    params = random_params(SMALL, mesh_of(dp, tp), seed=7, dtype=dtype, vocab_block=BLOCK)
    assert_same_bits(params, expected_params(SMALL, random_tensors_of, tp=tp, dtype=dtype))


@pytest.fixture(scope="module", name="random_tensors_of")
def fixture_random_tensors_of():
    """The tensors that seed 7 draws on one device, under their Hugging Face names."""
    params = random_params(SMALL, mesh_of(1, 1), seed=7, dtype="float32", vocab_block=BLOCK)
    return {
        spec.hf_name: array[: spec.hf_shape[0]] for spec, array in separated(params, SMALL, tp=1)
    }


@pytest.mark.slow
def test_random_weights_have_the_scale_they_say():
    config = dataclasses.replace(SMALL, hidden_size=256, intermediate_size=512, vocab_size=512)
    params = random_params(config, mesh_of(1, 2), seed=1, dtype="float32", vocab_block=BLOCK)
    for name, fan_in in (("gate_up", 256), ("down", 512)):
        matrix = np.asarray(params["layers"][0][name], np.float64)
        assert abs(matrix.std() * np.sqrt(fan_in) - 1) < 0.02
        assert abs(matrix.mean() * np.sqrt(fan_in)) < 0.02
    assert 0.02 < np.asarray(params["final_norm"]).std() < 0.06
    assert abs(np.asarray(params["final_norm"]).mean() - 1) < 0.01
    assert 0 < np.asarray(params["layers"][0]["qkv_bias"]).std() < 0.04


@pytest.mark.slow
def test_random_weights_depend_on_the_seed_and_the_name():
    config = dataclasses.replace(SMALL, num_layers=2, qkv_bias=False)

    def draw(seed):
        return random_params(config, mesh_of(1, 1), seed=seed, dtype="float32", vocab_block=BLOCK)

    first, again, other = draw(0), draw(0), draw(1)
    assert_same_bits(first, again)
    assert (np.asarray(first["embed"]) != np.asarray(other["embed"])).mean() > 0.9
    (gate, up), (_, other_up) = (np.split(np.asarray(x["gate_up"]), 2) for x in first["layers"])
    assert (up != other_up).mean() > 0.9
    assert (up != gate).mean() > 0.9


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=rf"seed={seed} must be in \[0, 2\*\*32\)"):
        random_params(CONFIG, mesh_of(1, 1), seed=seed, dtype="bfloat16", vocab_block=BLOCK)


# ------------------------------------------------------------------------------ what is written


@pytest.mark.invariance
@pytest.mark.parametrize(
    "saved_on", quick_and_slow([(1, 8), (2, 2)], [((1, 1),), ((2, 4),)]), ids=str
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weights_are_written_with_the_bits_of_the_file_from_every_mesh(tmp_path, tied, saved_on):
    """Repeated heads once, no padding, a tied table once, and both zeros."""
    config = dataclasses.replace(SMALL, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path, tensors)
    params = load(folder, config, dp=saved_on[0], tp=saved_on[1])
    out = tmp_path / "written"
    write_weights(out, params, config, mesh_of(*saved_on), vocab_block=BLOCK, source=folder)
    written = load_file(out / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype and (raw(written[name]) == raw(tensor)).all()


# --------------------------------------------------------------------------------- whole models


def test_a_placed_weight_is_no_view_of_its_file():
    """A CPU device may hold the very memory that it is given, and what is mapped may change."""
    mesh = make_mesh(dp=1, tp=1, platform="cpu")
    specs = jax.tree.leaves(tensor_specs(CONFIG, tp=1, vocab_block=BLOCK))
    spec = next(spec for spec in specs if not spec.is_rearranged and len(spec.shape) == 2)
    size = 4 * int(np.prod(spec.shape))
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64  # what is not aligned is copied in any case
    rows = memory[start : start + size].view(np.float32).reshape(spec.shape)
    placed = place_tensor(rows, spec, mesh, dtype=jnp.dtype(jnp.float32), name="a tensor")
    whole = NamedSharding(mesh, PartitionSpec())
    control = jax.make_array_from_callback(rows.shape, whole, lambda index: rows[index])
    rows[:] = 1
    assert not np.asarray(placed).any()
    assert np.asarray(control).all()


def test_readers_keep_the_order_and_go_no_further_ahead_than_allowed():
    started, may_end = [], threading.Event()

    def read(item):
        started.append(item)
        assert may_end.wait(30)
        return -item

    with contextlib.ExitStack() as stack:
        found = weights_load.map_ahead(read, range(20), 3, stack)
        first = threading.Thread(target=lambda: next(found))
        first.start()
        while len(started) < 3:
            time.sleep(0.001)
        assert sorted(started) == [0, 1, 2]
        may_end.set()
        first.join()
        assert list(found) == [-i for i in range(1, 20)]


def test_a_tensor_that_cannot_be_read_ends_the_reading():
    read_items = []

    def read(item):
        read_items.append(item)
        if item == 2:
            raise ValueError("tensor 2 is damaged")
        return item

    found = []
    with pytest.raises(ValueError, match="tensor 2 is damaged"), contextlib.ExitStack() as stack:
        found.extend(weights_load.map_ahead(read, range(100), 2, stack))
    assert len(read_items) < 7
