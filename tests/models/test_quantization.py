# SPDX-License-Identifier: Apache-2.0
"""A quantised checkpoint is its bfloat16 expansion, bit for bit, or is refused by name."""

import contextlib
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from detjax import models, quantize
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.errors import SelfCheckError
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models import layers, loading
from detjax.models.abstract import why_weights_unsupported
from detjax.models.hf_config import load_config
from detjax.models.loading import LoadedModel, load_model
from detjax.models.params import ParamSpec, RowRun, tensor_specs
from detjax.models.quantization.expand import describe_quantization, expand_tensors
from detjax.models.quantization.quantize import (
    GROUP_SIZES,
    RECIPES,
    pack,
    quantize_folder,
    quantize_matrix,
)
from detjax.models.quantization.rounding import to_bfloat16, to_float8
from detjax.models.quantization.scheme import as_w8a8, parse_quantization, weights_option
from detjax.models.weights.files import StoredTensor, open_tensors
from detjax.models.weights.load import ignore_progress
from detjax.models.weights.packed import MatrixForm, has_packed, kept_form
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import portable
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.kernel_table import KERNELS
from detjax.pallas_kernels.linear.quantized import (
    CodeType,
    QuantizedRows,
    RowCoding,
    W8A8Matrix,
    quantized_rows,
)
from detjax.pallas_kernels.moe import reference as moe
from detjax.parallel.mesh import make_mesh
from detjax.proof.identity import Identifier
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import answers, cpu_backend, dummy_config
from detjax.testing.folders import make_static, with_settings, write_model_folder

from .published_configs import AWQ, STATIC_FP8

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": 0,
}  # fmt: skip
"""Two ranks have whole groups of 128 of every matrix, so all of them stay packed."""

BUNDLED = Path(models.__file__).parent / "bundled" / "novels-6m"
CASES = sorted(path.stem for path in (GOLDEN / "quantized").glob("*.safetensors"))
Parts = dict[str, np.ndarray]


# ------------------------------------------------------------------------ one matrix, many formats


def case_of(name: str, folder: Path) -> tuple[Parts, np.ndarray, dict[str, Any]]:
    """The parts of a golden, their expansion, and config.json's settings."""
    shutil.copyfile(GOLDEN / "quantized" / f"{name}.safetensors", folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", "np") as file:
        settings = json.loads(file.metadata()["quantization_config"])
    with contextlib.ExitStack() as stack:
        parts = {key: np.array(t.rows) for key, t in open_tensors(folder, stack).items()}
    return parts, parts.pop("expanded"), {"quantization_config": settings}


def expanded(folder: Path, parts: Parts, config: dict[str, Any]) -> dict[str, StoredTensor]:
    save_file(parts, folder / "model.safetensors")
    with contextlib.ExitStack() as stack:
        return expand_tensors(open_tensors(folder, stack), parse_quantization(config))


def bits(values: np.ndarray) -> list[list[int]]:
    return np.asarray(values).view(np.uint16).tolist()


def test_every_format_has_a_golden():
    assert len(CASES) == 13


@pytest.mark.parametrize("name", CASES)
def test_an_expansion_has_the_bits_of_compressed_tensors(tmp_path, name):
    parts, expected, config = case_of(name, tmp_path)
    found = expanded(tmp_path, parts, config)
    weight = found["layer.weight"]
    assert list(found) == ["layer.weight"] and weight.dtype == "BF16"
    assert bits(weight.rows[:]) == bits(expected)
    for rows, columns in ((slice(7, 90), slice(33, 201)), (slice(95, 96), slice(0, 1))):
        assert bits(weight.rows[rows, columns]) == bits(expected[rows, columns])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("awq_int4", {"quant_method": "gptq", "bits": 4, "group_size": 64}),
        ("int4_group128_zero", {"group_size": 64}),
    ],
)
def test_a_wrong_reading_is_refused_or_has_other_bits(tmp_path, name, settings):
    parts, expected, config = case_of(name, tmp_path)
    if "quant_method" in settings:  # words along the other axis, in another order
        config = {"quantization_config": settings}
        parts["layer.qweight"] = parts["layer.qweight"].T.copy()
        parts = parts | {"layer.scales": parts["layer.scales"][:, :32].copy()}
        parts["layer.qzeros"] = parts["layer.qzeros"][:, :4].copy()
        with pytest.raises(ValueError, match="has shape"):
            expanded(tmp_path, parts, config)
        return
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(settings)
    with pytest.raises(ValueError, match="weight_scale.* has shape"):
        expanded(tmp_path, parts, config)


def test_the_order_of_awq_words_is_seen_in_bits(tmp_path):
    parts, expected, config = case_of("awq_int4", tmp_path)
    words = parts["layer.qweight"].view(np.uint32)
    low, high = words & np.uint32(0xF0), words & np.uint32(0xF00)
    swapped = (words & ~np.uint32(0xFF0)) | (low << 4) | (high >> 4)
    parts["layer.qweight"] = swapped.view(np.int32)
    assert bits(expanded(tmp_path, parts, config)["layer.weight"].rows[:]) != bits(expected)


def test_blocks_under_the_names_of_deepseek(tmp_path):
    parts, expected, config = case_of("float8_block", tmp_path)
    parts["layer.weight_scale_inv"] = parts.pop("layer.weight_scale")
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [64, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    found = expanded(tmp_path, parts, {"quantization_config": settings})
    assert bits(found["layer.weight"].rows[:]) == bits(expected)
    # A factor it is: its inverse gives other weights.
    inverse = (1 / parts["layer.weight_scale_inv"].astype(np.float32)).astype(ml_dtypes.bfloat16)
    other = expanded(
        tmp_path, parts | {"layer.weight_scale_inv": inverse}, {"quantization_config": settings}
    )
    assert bits(other["layer.weight"].rows[:]) != bits(expected)


def test_static_scales_under_the_names_of_transformers(tmp_path):
    """One scale a tensor, and one of activations: as Ministral 3 is published."""
    codes = np.arange(64, dtype=np.uint8).reshape(4, 16).view(ml_dtypes.float8_e4m3fn)
    parts = {
        "layer.weight": codes,
        "layer.weight_scale_inv": np.array(0.75, ml_dtypes.bfloat16),
        "layer.activation_scale": np.array(0.5, ml_dtypes.bfloat16),
        "vision.weight": np.ones((2, 2), ml_dtypes.bfloat16),
    }
    config = {"quantization_config": STATIC_FP8}
    found = expanded(tmp_path, parts, config)
    want = (codes.astype(np.float32) * np.float32(0.75)).astype(ml_dtypes.bfloat16)
    assert bits(found["layer.weight"].rows[:]) == bits(want)
    assert found["layer.weight"].rows.row_scale() == 0.5
    assert found.keys() == {"layer.weight", "vision.weight"}
    scheme = as_w8a8(parse_quantization(config))
    said = describe_quantization(tmp_path, scheme)
    expanded(tmp_path, parts | {"layer.activation_scale": parts["layer.weight_scale_inv"]}, config)
    assert describe_quantization(tmp_path, scheme) != said


def test_fbgemm(tmp_path):
    parts, expected, _ = case_of("float8_channel_float32", tmp_path)
    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    found = expanded(tmp_path, parts, {"quantization_config": settings})
    assert bits(found["layer.weight"].rows[:]) == bits(expected)


def test_input_channels_that_fill_no_whole_word(tmp_path):
    codes = np.random.default_rng(0).integers(0, 16, (3, 21))
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": {"num_bits": 4, "strategy": "channel"}}},
    }
    parts = {
        "x.weight_packed": pack(codes, 4),
        "x.weight_scale": np.array([[1], [2], [0.5]], ml_dtypes.bfloat16),
        "x.weight_shape": np.array([3, 21], np.int64),
        "x.bias": np.zeros(3, np.float32),
    }
    found = expanded(tmp_path, parts, {"quantization_config": settings})
    assert found["x.weight"].shape == (3, 21) and set(found) == {"x.weight", "x.bias"}
    assert np.array_equal(
        found["x.weight"].rows[:].astype(np.float32), (codes - 8) * [[1], [2], [0.5]]
    )


# ------------------------------------------------------------------------------------ refusals

INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "strategy": "channel"}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": INT4}},
}


def with_weights(**changed: Any) -> dict[str, Any]:
    return CT | {"config_groups": {"group_0": {"weights": INT4 | changed}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported"),
        ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\] is not supported"),
        ({}, "quant_method=None is not supported"),
        ("fp8", "must be one JSON object"),
        (CT | {"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized' is not supported"),
        (CT | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme=.* is not supported"),
        (CT | {"transform_config": {"r1": {}}}, "transform_config=.* is not supported"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config=.* is not"),
        (CT | {"new_key": 1}, "new_key=1 is not a key that detjax knows"),
        (CT | {"config_groups": {}}, "0 config_groups of 0 kinds"),
        (with_weights(num_bits=3), "num_bits=3 is not supported"),
        (with_weights(num_bits=True), "num_bits=True is not supported"),
        (with_weights(group_size=0), "group_size=0 must be an integer from 1"),
        (with_weights(actorder="group"), "actorder='group' is not supported"),
        (with_weights(dynamic=True), "dynamic=True is not supported"),
        (with_weights(strategy="block", group_size=None), "block_structure=None must be two"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "desc_act=True"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits=3 is not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
          "version": "gemv"}, "version='gemv' is not supported"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
         "scale_fmt='ue8m0' is not supported"),
    ],
)  # fmt: skip
def test_settings_that_are_not_read_are_refused_by_name(settings, message):
    config = {"quantization_config": settings}
    with pytest.raises(ValueError, match=message):
        parse_quantization(config)


def test_groups_of_two_kinds_are_refused():
    groups = {"a": {"weights": INT4}, "b": {"weights": INT8}}
    with pytest.raises(ValueError, match="2 config_groups of 2 kinds"):
        parse_quantization({"quantization_config": CT | {"config_groups": groups}})
    same = {"a": groups["a"], "b": groups["a"] | {"targets": ["re:.*mlp.*"]}}
    assert parse_quantization({"quantization_config": CT | {"config_groups": same}}) is not None


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("gptq_int4", lambda p: p["layer.g_idx"].__setitem__(3, 1), "out of their order"),
        ("int4_group32", lambda p: p.pop("layer.weight_shape"), "lacks its weight_shape"),
        ("int4_group32", lambda p: p["layer.weight_shape"].__setitem__(1, 264), "not go with"),
        ("int4_group128_zero", lambda p: p.pop("layer.weight_zero_point"), "lacks zero points"),
        ("int8_channel", lambda p: p.update({"layer.weight_zero_point": np.int8([[0]] * 96)}),
         "has zero points"),
        ("int8_channel", lambda p: p.pop("layer.weight_scale"), "no tensor has scales"),
        ("int8_channel", lambda p: p.update({"layer.weight": p["layer.weight"].astype(np.int32)}),
         "is I32, but config.json makes it I8"),
        ("int8_channel", lambda p: p["layer.weight_scale"].__setitem__(7, np.nan), "is not finite"),
        ("float8_block", lambda p: p.update({"layer.weight_scale": p["layer.weight_scale"][:1]}),
         "has shape"),
    ],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_refused_by_name(tmp_path, name, damage, message):
    parts, _, config = case_of(name, tmp_path)
    damage(parts)
    with pytest.raises(ValueError, match=message):
        _ = expanded(tmp_path, parts, config)["layer.weight"].rows[:]


# ----------------------------------------------------------------------------------- whole models


def folder_of(case: str, out: Path) -> Path:
    """A golden's folder, or that of a model whose matrices can stay packed."""
    if case == "small":
        return write_model_folder(out, SMALL, scale=128**-0.5)
    out.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "hf" / case / name, out / name)
    return out


def expanded_folder(folder: Path, out: Path) -> Path:
    """The same model with its expansion stored."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    scheme = parse_quantization(config)
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    with contextlib.ExitStack() as stack:
        tensors = expand_tensors(open_tensors(folder, stack), scheme)
        whole = {name: np.array(tensor.rows[:]) for name, tensor in tensors.items()}
        save_file(whole, out / "model.safetensors")
    return out


def opened(folder: Path, tp: int = 1, mode: str = "auto") -> LoadedModel:
    profile = NumericsProfile()
    return load_model(
        str(folder),
        profile=profile,
        mesh=make_mesh(dp=1, tp=tp, platform="cpu"),
        backend=cpu_backend(load_config(folder), profile, tp),
        quantized_weights=mode,
    )


def digests(model: LoadedModel) -> list[str]:
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3)
    prompts = ([9, 20, 31, 42], [100, 7, 8], list(range(30, 60)))
    requests = [Request(prompt_token_ids=tuple(prompt), sampling=params) for prompt in prompts]
    return [answer.digest() for answer in answers(model, requests, max_len=64)]


def weights_on_two_ranks(folder: Path) -> dict[str, bytes]:
    """The bits of every parameter, as a model on two ranks has it."""
    params = jax.tree_util.tree_leaves_with_path(opened(folder, tp=2).params)
    return {jax.tree_util.keystr(path): np.asarray(weight).tobytes() for path, weight in params}


def test_weights_on_two_ranks_are_those_of_the_expanded_folder(tmp_path):
    folder = folder_of("qwen3_moe", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES["fp8-dynamic"], progress=ignore_progress)
    want = weights_on_two_ranks(expanded_folder(tmp_path / "q", tmp_path / "expanded"))
    assert weights_on_two_ranks(tmp_path / "q") == want
    # The comparison can fail: the model before it was quantised has other weights.
    assert weights_on_two_ranks(folder) != want


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "scheme", "tp"),
    quick_and_slow(
        [("small", "int8-w8a16", 1)],
        [("llama3", "int8-w8a16", 1), ("qwen3_moe", "fp8-dynamic", 2)],
    ),
)
def test_answers_are_those_of_the_expanded_folder(tmp_path, case, scheme, tp):
    folder = folder_of(case, tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES[scheme], progress=ignore_progress)
    whole = expanded_folder(tmp_path / "q", tmp_path / "expanded")
    quantized, plain = opened(tmp_path / "q"), opened(whole)
    assert digests(quantized) == digests(plain)
    assert tp == 1 or digests(opened(tmp_path / "q", tp=tp)) == digests(plain)
    # The model before it was quantised answers otherwise: the comparison can fail.
    assert digests(opened(folder)) != digests(plain)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "tp"), [("int4-w4a16", 2), ("fp8-dynamic", 1)])
def test_weights_that_stay_packed_give_the_same_answers(tmp_path, scheme, tp):
    folder = folder_of("small", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES[scheme], progress=ignore_progress)
    packed, plain = opened(tmp_path / "q", tp, "packed"), opened(tmp_path / "q")
    assert has_packed(packed.params) and not has_packed(plain.params)
    assert digests(packed) == digests(plain)
    hashes = {Identifier(it, name="q", tokenizer=None).weights() for it in (packed, plain)}
    assert len(hashes) == 1
    # A code that is one off is seen: the comparison can fail.
    down = packed.params["layers"][0]["down"]
    other = dataclasses.replace(down, codes=down.codes.at[0, 0, 0, 0].add(1))
    packed.params["layers"][0]["down"] = other
    assert Identifier(packed, name="q", tokenizer=None).weights() not in hashes


@pytest.mark.slow
def test_answers_of_packed_weights_do_not_depend_on_who_adds(tmp_path, monkeypatch):
    """Sums left to the next product, in decode alone or for prompts too, change no answer."""
    folder = write_model_folder(
        tmp_path / "bf16", SMALL | {"num_hidden_layers": 2}, scale=128**-0.5
    )
    quantize_folder(folder, tmp_path / "q", RECIPES["int4-w4a16"], progress=ignore_progress)
    model = opened(tmp_path / "q", mode="packed")
    want, plain_sum = digests(model), layers.combine_norm_linear
    for most_rows in (1, 1024):
        late = []

        def says(x, w, most_rows=most_rows, late=late, **_) -> bool:
            late.append(len(x) <= most_rows)
            return late[-1]

        monkeypatch.setattr(layers, "defers_sum", says)
        assert digests(opened(tmp_path / "q", mode="packed")) == want
        assert any(late) and all(late) == (most_rows == 1024)

    # A stream that is not added up is seen: the comparison can fail.
    def forgets(leaf_sums, residual, *rest, **options):
        out, _, x = plain_sum(leaf_sums, residual, *rest, **options)
        return out, residual, x

    monkeypatch.setattr(layers, "combine_norm_linear", forgets)
    assert digests(opened(tmp_path / "q", mode="packed")) != want


@pytest.mark.slow
def test_packed_weights_are_replaced_by_those_of_a_folder_and_by_no_names(tmp_path):
    folder = folder_of("small", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES["int8-w8a16"], progress=ignore_progress)
    model = opened(tmp_path / "q", mode="packed")
    before = digests(model)
    model.replace_weights(model.read_folder(tmp_path / "q"))
    assert digests(model) == before
    with pytest.raises(ValueError, match="cannot take tensors by name; load the model with"):
        model.named_weights([])
    with pytest.raises(ValueError, match="cannot be saved; load the model with"):
        model.save(tmp_path / "saved")


@pytest.mark.slow
def test_packed_weights_are_replaced_by_those_of_other_scales(tmp_path):
    scheme = RECIPES["int8-w8a16"]
    folder = folder_of("small", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", scheme, progress=ignore_progress)
    model = opened(tmp_path / "q", mode="packed")
    down = model.params["layers"][0]["down"]
    assert down.has_small_scales
    large = shutil.copytree(tmp_path / "q", tmp_path / "large")
    tensors = load_file(large / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    tensors[name] = tensors[name] * np.float32(2.0**12).astype(tensors[name].dtype)
    save_file(tensors, large / "model.safetensors")
    with pytest.raises(ValueError, match=r"scales of weight .*'down'.* are outside of"):
        model.read_folder(large)
    # Code for scales of any size takes small ones as well.
    other = opened(large, mode="packed")
    assert not other.params["layers"][0]["down"].has_small_scales
    other.replace_weights(other.read_folder(tmp_path / "q"))
    assert digests(other) == digests(model)


def w8a8_folder(tmp_path: Path, scheme: str = "int8-w8a8") -> Path:
    folder = folder_of("small", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES[scheme], progress=ignore_progress)
    return tmp_path / "q"


@pytest.mark.quick_cases("fp8-block-float-float8_e4m3fn")
@pytest.mark.parametrize(
    ("scheme", "kind", "dtype"),
    [
        ("int8-w8a8", "int", jnp.int8), ("fp8-dynamic", "float", jnp.float8_e4m3fn),
        ("fp8-block", "float", jnp.float8_e4m3fn),
    ],
)  # fmt: skip
def test_8_bit_activations_are_another_function_with_the_same_weights(
    tmp_path, scheme, kind, dtype
):
    folder = w8a8_folder(tmp_path, scheme)
    both, plain = opened(folder, mode="w8a8"), opened(folder)
    down = both.params["layers"][0]["down"]
    assert isinstance(down, W8A8Matrix) and down.values.dtype == dtype
    assert not isinstance(both.params["lm_head"], W8A8Matrix)
    share = "group of 128" if scheme == "fp8-block" else "token"
    asked = f"multiplied with activations of 8-bit {kind}, dynamic by {share}"
    assert both.quantization.endswith(asked)
    assert [weights_option(it.quantization) for it in (both, plain)] == ["w8a8", "auto"]
    assert both.fingerprint != plain.fingerprint
    hashes = {Identifier(it, name="q", tokenizer=None).weights() for it in (both, plain)}
    assert len(hashes) == 1
    assert digests(both) != digests(plain)
    # The hash of weights can fail: a weight that is one off is seen.
    other = dataclasses.replace(down, values=down.values.at[0, 0].set(-down.values[0, 0] - 1))
    both.params["layers"][0]["down"] = other
    assert Identifier(both, name="q", tokenizer=None).weights() not in hashes


@pytest.mark.slow
@pytest.mark.parametrize("scheme", quick_and_slow(["fp8-block"], ["fp8-dynamic", "int8-w8a8"]))
def test_answers_of_8_bit_activations_depend_on_no_batch_and_no_schedule(
    tmp_path, monkeypatch, scheme
):
    model = opened(w8a8_folder(tmp_path, scheme), mode="w8a8")
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3)
    prompts = ([9, 20, 31, 42], [100, 7, 8], list(range(30, 60)), [5] * 17)
    requests = [Request(prompt_token_ids=tuple(prompt), sampling=params) for prompt in prompts]

    def engine(model: LoadedModel, **options) -> Engine:
        sizes = {"batch_size": 4, "prefill_chunk": 64, "max_len": 64}
        return Engine(model, EngineConfig(**(sizes | options)))

    def found(of: Engine, requests: list[Request]) -> list[str]:
        return [answer.digest() for answer in of.generate(requests)]

    first = engine(model)
    together = found(first, requests)
    assert [found(first, [request])[0] for request in requests] == together
    assert found(engine(model, prefill_chunk=16, batch_size=2), requests) == together
    assert found(engine(model, mode="dvr", verify_window=4), requests) == together
    # Control: one scale for all rows of a batch, as dynamic quantisation by tensor has it.
    kernels = KERNELS[model.backend]
    product, swiglu = kernels.w8a8_product, kernels.w8a8_swiglu

    def by_tensor(x, coding):
        rows = kernels.quantize_rows(x, coding)
        peak = jnp.max(rows.scales)
        values = (x.astype(jnp.float32) / jnp.maximum(peak, 1e-30)).astype(rows.dtype)
        return QuantizedRows(values=values, scales=jnp.full_like(rows.scales, peak))

    def quantized(x):
        return quantized_rows(x, quantize_rows=by_tensor, rms_norm=kernels.rms_norm)

    monkeypatch.setattr(
        kernels, "w8a8_product", lambda x, *args, **named: product(quantized(x), *args, **named)
    )
    monkeypatch.setattr(
        kernels, "w8a8_swiglu", lambda x, *args, **named: swiglu(quantized(x), *args, **named)
    )
    model = opened(tmp_path / "q", mode="w8a8")
    unchecked = engine(model, self_check="off")
    alone = [found(unchecked, [request])[0] for request in requests]
    assert alone != found(unchecked, requests)
    with pytest.raises(SelfCheckError, match="different bits"):
        found(engine(model), requests)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("scheme", "tp"),
    quick_and_slow([("fp8-block", 4)], [("fp8-dynamic", 2), ("int8-w8a8", 4)]),
)
def test_answers_of_8_bit_activations_depend_on_no_mesh(tmp_path, monkeypatch, scheme, tp):
    folder = w8a8_folder(tmp_path, scheme)
    one, many = opened(folder, mode="w8a8"), opened(folder, tp, "w8a8")
    down = many.params["layers"][0]["down"]
    assert down.values.addressable_shards[0].data.shape == (128 // tp, 256)
    want = digests(one)
    assert digests(many) == want
    hashes = {Identifier(it, name="q", tokenizer=None).weights() for it in (one, many)}
    assert len(hashes) == 1
    # Control: each rank's channels by their own greatest value, as row-parallel layers elsewhere.
    whole = layers._add_own_outputs

    def by_rank(ctx, x, w, *rest):
        # At tp 4 they are half a group.
        rows = portable.quantize_rows(x, RowCoding(dtype=w.values.dtype))
        values = rows.values.astype(jnp.float32) * rows.scales[:, None]
        return whole(ctx, values.astype(x.dtype), w, *rest)

    monkeypatch.setattr(layers, "_add_own_outputs", by_rank)
    assert digests(opened(folder, tp, "w8a8")) != want


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_8_bit_weights_are_replaced_by_those_of_a_folder(tmp_path, tp):
    folder = w8a8_folder(tmp_path)
    model = opened(folder, tp, "w8a8")
    before = digests(model)
    model.replace_weights(model.read_folder(folder))
    assert digests(model) == before
    model.check_folder(folder)
    with pytest.raises(ValueError, match="cannot take tensors by name"):
        model.named_weights([])


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("int8-w8a16", "needs symmetric 8-bit weights .* this checkpoint has weights of"),
        ("int4-w4a16", "this checkpoint has weights of the format"),
    ],
)
def test_8_bit_activations_are_refused_by_reason(tmp_path, scheme, message):
    folder = folder_of("small", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES[scheme], progress=ignore_progress)
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "q", mode="w8a8")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dynamic", False, "activations of '8-bit int, static by token'"),
        ("symmetric", False, "activations of '8-bit int with zero points, dynamic by token'"),
        ("strategy", "tensor", "activations of '8-bit int, dynamic by tensor'"),
    ],
)
def test_other_activations_are_refused(tmp_path, key, value, message):
    folder = folder_of("llama3", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES["int8-w8a8"], progress=ignore_progress)
    path = tmp_path / "q" / "config.json"
    config = json.loads(path.read_text())
    [group] = config["quantization_config"]["config_groups"].values()
    group["input_activations"][key] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "q", mode="w8a8")


def scale_of(layer: str) -> float:
    return 0.02 if "down" in layer else 0.01


@pytest.mark.slow
def test_blocks_as_deepseek_and_qwen_publish_them_give_the_same_answers(tmp_path):
    folder = w8a8_folder(tmp_path, "fp8-block")
    want = digests(opened(folder, mode="w8a8"))
    settings = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }  # fmt: skip
    with_settings(folder, settings)
    with contextlib.ExitStack() as stack:
        tensors = {name: np.array(it.rows) for name, it in open_tensors(folder, stack).items()}
    renamed = {name.replace("weight_scale", "weight_scale_inv"): it for name, it in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    model = opened(folder, mode="w8a8")
    assert model.quantization.endswith("128 x 128 block, multiplied with activations of 8-bit "
                                       "float, dynamic by group of 128")  # fmt: skip
    assert digests(model) == want


@pytest.mark.slow
def test_static_scales_of_activations_are_those_of_the_checkpoint(tmp_path):
    folder = w8a8_folder(tmp_path, "fp8-dynamic")
    dynamic = opened(folder, mode="w8a8")
    with_settings(folder, make_static, input_scale=scale_of)
    model = opened(folder, mode="w8a8")
    want = digests(model)
    assert want != digests(dynamic) and digests(opened(folder, 2, "w8a8")) == want
    down = model.params["layers"][0]["down"]
    assert float(down.row_scale) == np.float32(0.02)
    assert "8-bit float, static by tensor, sha256 of its scales" in model.quantization
    model.check_folder(folder)
    model.replace_weights(model.read_folder(folder))
    with_settings(folder, lambda settings: None, input_scale=lambda layer: 2 * scale_of(layer))
    other = opened(folder, mode="w8a8")
    assert digests(other) != want and other.fingerprint != model.fingerprint
    with pytest.raises(ValueError, match="the fingerprint says"):
        model.check_folder(folder)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda layer: 0.0, "is not one positive number"),
        (lambda layer: [0.1, 0.2], "is not one positive number"),
        (lambda layer: 0.5 if "k_proj" in layer else 0.25, "have several scales of these.*k_proj"),
    ],
    ids=["zero", "two", "several"],
)
def test_static_scales_that_no_product_takes_are_refused(tmp_path, value, message):
    folder = with_settings(w8a8_folder(tmp_path), make_static, input_scale=value)
    with pytest.raises(ValueError, match=message):
        opened(folder, mode="w8a8")


@pytest.mark.slow
def test_the_bound_of_fbgemm_limits_the_peak_of_a_row(tmp_path):
    folder = w8a8_folder(tmp_path, "fp8-dynamic")
    want = digests(opened(folder, mode="w8a8"))

    def found(bound: float | None) -> list[str]:
        settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": bound}
        model = opened(with_settings(folder, settings), mode="w8a8")
        assert model.params["layers"][0]["down"].row_bound == (bound or 0)
        assert model.quantization.endswith(f"peaks of at most {bound:g}" if bound else "by token")
        return digests(model)

    assert found(1200.0) == want and found(None) == want
    assert found(0.5) != want  # rows have greater values
    with pytest.raises(ValueError, match="activation_scale_ub=-1 must be a positive number"):
        found(-1)


EXPERTS = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def experts_folder(tmp_path: Path, scheme: str) -> Path:
    write_model_folder(tmp_path / "bf16", EXPERTS, scale=128**-0.5)
    quantize_folder(tmp_path / "bf16", tmp_path / "q", RECIPES[scheme], progress=ignore_progress)
    return tmp_path / "q"


WIDER = {
    "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
WIDER_EXPERTS = WIDER | {"moe_intermediate_size": 512}


FEW_OUTPUTS = "multiple of 64 outputs, not 32"


@pytest.mark.parametrize(
    ("config", "block_rows", "tp", "says"),
    [
        (SMALL | WIDER, 128, 1, None),
        (SMALL | WIDER, 32, 1, FEW_OUTPUTS),
        pytest.param(EXPERTS | WIDER_EXPERTS, 128, 4, None, marks=pytest.mark.slow),
        pytest.param(EXPERTS | WIDER_EXPERTS, 32, 1, FEW_OUTPUTS, marks=pytest.mark.slow),
        pytest.param(SMALL, 128, 1, "512 channels", marks=pytest.mark.slow),
        # A rank of four has 160 of 640 gates, which are no whole blocks.
        pytest.param(
            SMALL | WIDER | {"intermediate_size": 640}, 128, 4, "128 rows, not 320",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_weights_that_a_kernel_refuses_are_refused_when_they_are_loaded(
    tmp_path, monkeypatch, config, block_rows, tp, says
):
    """As they lie on the devices: the configuration alone does not say it."""
    write_model_folder(tmp_path / "bf16", config, scale=512**-0.5)
    recipe = dataclasses.replace(RECIPES["fp8-block"], block_rows=block_rows)
    quantize_folder(tmp_path / "bf16", tmp_path / "q", recipe, progress=ignore_progress)
    model = opened(tmp_path / "q", tp, "w8a8")
    weights = {"params": model.params, "specs": model.partition_specs}
    found = why_weights_unsupported(model.config, model.profile, Backend.SM90, tp, **weights)
    assert (found is None) == (says is None), found
    if says is not None:
        assert says in (found or "")
        monkeypatch.setattr(loading, "why_weights_unsupported", lambda *_, **__: found)
        with pytest.raises(ValueError, match=f"'w8a8' does not fit reference: .*{says}"):
            opened(tmp_path / "q", mode="w8a8")


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("scheme", quick_and_slow(["fp8-block"], ["fp8-dynamic", "int8-w8a8"]))
def test_answers_of_experts_of_8_bits_depend_on_no_batch_and_no_mesh(tmp_path, monkeypatch, scheme):
    folder = experts_folder(tmp_path, scheme)
    model = opened(folder, mode="w8a8")
    down = model.params["layers"][0]["expert_down"]
    assert isinstance(down, W8A8Matrix) and down.shape == (8, 128, 128)
    want = digests(model)
    assert digests(opened(folder, 2, "w8a8")) == want
    assert digests(opened(folder)) != want  # bfloat16 activations are another function
    hashes = {Identifier(it, name="q", tokenizer=None).weights() for it in (model, opened(folder))}
    assert len(hashes) == 1
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=3)
    prompts = ([9, 20, 31, 42], [100, 7, 8], list(range(30, 60)))
    requests = [Request(prompt_token_ids=tuple(prompt), sampling=params) for prompt in prompts]

    def found(engine: Engine, requests: list[Request]) -> list[str]:
        return [answer.digest() for answer in engine.generate(requests)]

    sizes = {"batch_size": 4, "prefill_chunk": 16, "max_len": 64}
    first = Engine(model, EngineConfig(**sizes))
    together = found(first, requests)
    assert [found(first, [request])[0] for request in requests] == together
    # Control: one scale for all rows of all experts.
    rows_alone = moe.quantize_rows

    def by_tensor(x, coding):
        rows = rows_alone(x, coding)
        peak = jnp.max(rows.scales)
        values = (x.astype(jnp.float32) / jnp.maximum(peak, 1e-30)).astype(rows.dtype)
        return QuantizedRows(values=values, scales=jnp.full_like(rows.scales, peak))

    monkeypatch.setattr(moe, "quantize_rows", by_tensor)
    unchecked = Engine(opened(folder, mode="w8a8"), EngineConfig(**sizes, self_check="off"))
    alone = [found(unchecked, [request])[0] for request in requests]
    shared = found(unchecked, requests)
    assert alone != shared


@pytest.mark.parametrize(
    ("quantized", "mode", "message"),
    [
        (True, "bf16", "quantized_weights='bf16' must be one of"),
        (False, "packed", "needs a quantised model, and this one is not"),
    ],
)
def test_modes_that_do_not_fit_are_refused(tmp_path, quantized, mode, message):
    folder = folder_of("llama3", tmp_path / "bf16")
    if quantized:
        quantize_folder(folder, tmp_path / "q", RECIPES["int8-w8a16"], progress=ignore_progress)
        folder = tmp_path / "q"
    with pytest.raises(ValueError, match=message):
        opened(folder, mode=mode)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "they are of different models"),
        ({"num_hidden_layers": 3}, "lacks 9 of"),
        ({"num_hidden_layers": 1}, "which this model has no place for"),
    ],
)
def test_a_folder_that_could_not_be_opened_is_not_quantised(tmp_path, changes, message):
    folder = folder_of("llama3", tmp_path / "bf16")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ValueError, match=message):
        quantize_folder(folder, tmp_path / "q", RECIPES["int8-w8a16"], progress=ignore_progress)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("mode", "backend", "is_packed"),
    [
        ("auto", Backend.SM90, True), ("auto", Backend.PORTABLE, False),
        ("expanded", Backend.SM90, False), ("packed", Backend.SM90, True),
        ("packed", Backend.PORTABLE, True),
    ],
)  # fmt: skip
def test_where_weights_stay_packed(mode, backend, is_packed):
    form = MatrixForm.PACKED if is_packed else MatrixForm.EXPANDED
    awq = parse_quantization({"quantization_config": AWQ})
    config = load_config(GOLDEN / "hf" / "llama3")
    assert loading._matrix_form(mode, awq, config, NumericsProfile(), backend) is form
    wide = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
    if mode == "packed":
        with pytest.raises(ValueError, match="does not go with float32 weights"):
            loading._matrix_form(mode, awq, config, wide, backend)
    else:
        found = loading._matrix_form(mode, awq, config, wide, backend)
        assert found is MatrixForm.EXPANDED


@pytest.mark.parametrize(
    ("name", "is_packed"),
    [("int4_group128_zero", True), ("int8_channel", True), ("int8_packed_group_zero", False)],
)
def test_int8_with_zero_points_is_expanded(tmp_path, name, is_packed):
    parts, _, config = case_of(name, tmp_path)
    rows = expanded(tmp_path, parts, config)["layer.weight"].rows
    spec = dataclasses.replace(
        tensor_specs(dummy_config(), tp=1, vocab_block=1)["layers"][0]["o"],
        shape=(64, 256), runs=(RowRun(start=0, source=0, num_rows=64),),
    )  # fmt: skip
    stored = StoredTensor(file=tmp_path, rows=rows, shape=rows.shape, dtype="BF16")
    param = ParamSpec(tensors=(spec,), shape=spec.shape, partition=spec.partition)
    form = kept_form(param, {spec.hf_name: stored}, 1, MatrixForm.PACKED)
    assert form is (MatrixForm.PACKED if is_packed else MatrixForm.EXPANDED)


@pytest.mark.parametrize("name", CASES)
def test_codes_scales_and_zero_points_stand_for_the_expansion(tmp_path, name):
    parts, expected, config = case_of(name, tmp_path)
    rows = expanded(tmp_path, parts, config)["layer.weight"].rows
    size = rows.group_len or rows.shape[1]
    every, groups = slice(0, rows.shape[0]), slice(0, rows.shape[1] // size)
    codes = rows.unsigned_codes(every, slice(None))
    if rows.code_type is CodeType.FLOAT8:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        zeros = np.full((rows.shape[0], 1), rows.code_type.middle)
        if rows.scheme.has_zero_points:
            zeros = rows.group_zeros(every, groups)
        values = codes - np.repeat(zeros, rows.shape[1] // zeros.shape[1], axis=1)
    scales = rows.group_scales(every, groups)
    assert scales.dtype == rows.scale_dtype
    products = values * np.repeat(scales.astype(np.float32), size, axis=1)
    assert bits(products.astype(np.float32).astype(ml_dtypes.bfloat16)) == bits(expected)


def test_a_float8_that_is_no_number_is_refused_where_it_would_stay_packed(tmp_path):
    parts, _, config = case_of("float8_channel", tmp_path)
    parts["layer.weight"].view(np.uint8)[3, 5] = 0xFF
    rows = expanded(tmp_path, parts, config)["layer.weight"].rows
    with pytest.raises(ValueError, match="a weight of 'layer' in .* is not a number"):
        rows.unsigned_codes(slice(0, 8), slice(0, 8))


def test_identity_and_fingerprint_name_the_quantisation(tmp_path):
    folder = folder_of("llama3", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES["fp8-dynamic"], progress=ignore_progress)
    plain, model = opened(folder), opened(tmp_path / "q")
    assert plain.quantization == "none" and plain.fingerprint != model.fingerprint
    facts = Identifier(model, name="q", tokenizer=None).identity().model
    assert facts["quantization"] == model.quantization
    assert model.quantization == (
        "compressed-tensors float-quantized: float8_e4m3fn with a scale for each output channel, "
        "expanded to bfloat16; activations stay bfloat16 where the checkpoint asks for 8-bit "
        "float, dynamic by token"
    )


def test_a_saved_quantised_model_is_its_expansion(tmp_path):
    """A bfloat16 folder, of the same weights, that nothing calls quantised."""
    folder = folder_of("llama3", tmp_path / "bf16")
    quantize_folder(folder, tmp_path / "q", RECIPES["fp8-dynamic"], progress=ignore_progress)
    plain, model = opened(folder), opened(tmp_path / "q")
    model.save(tmp_path / "saved")
    saved = opened(tmp_path / "saved")
    assert saved.quantization == "none" and saved.fingerprint == plain.fingerprint
    assert digests(saved) == digests(model) != digests(plain)


# -------------------------------------------------------------------------------------- quantising


def test_roundings_have_the_bits_of_ml_dtypes():
    words = np.random.default_rng(1).integers(0, 2**32, 2**20, dtype=np.uint32)
    halves = np.arange(2**16, dtype=np.uint32) << 16
    every = np.concatenate([words, halves, halves + 0x8000, halves + 0x7FFF, halves + 0x8001])
    values = every.view(np.float32)
    values = values[np.isfinite(values)]
    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(to_bfloat16(values.copy()).view(np.uint16), expected)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    middles = (codes[1:] + codes[:-1]) / 2
    near = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    small = np.concatenate([codes, middles, *near, values[np.abs(values) <= 448]])
    expected = small.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(to_float8(small).view(np.uint8), expected)


def test_a_code_is_the_nearest_one():
    generator = np.random.default_rng(5)
    weight = generator.normal(size=(6, 256)).astype(ml_dtypes.bfloat16)
    weight[2] = 0
    for name, recipe in RECIPES.items():
        made = quantize_matrix("a.weight", weight, recipe)
        scale = made["a.weight_scale"].astype(np.float32)
        group = recipe.group_size or 256
        assert scale.shape == (-(-6 // recipe.block_rows), 256 // group), name
        scale = scale.repeat(recipe.block_rows, axis=0)[:6]
        steps = weight.astype(np.float32) / scale.repeat(group, axis=1)
        if recipe.is_float:
            codes = made["a.weight"].astype(np.float32)
            grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            if recipe.format == "pack-quantized":
                per_word = 32 // recipe.num_bits
                words = made["a.weight_packed"].view(np.uint32)[..., None]
                shifts = np.arange(per_word, dtype=np.uint32) * recipe.num_bits
                unsigned = (words >> shifts & (2**recipe.num_bits - 1)).reshape(6, 256)
                codes = unsigned.astype(np.float32) - 2 ** (recipe.num_bits - 1)
            else:
                codes = made["a.weight"].astype(np.float32)
            grid = np.arange(-(2 ** (recipe.num_bits - 1)), 2 ** (recipe.num_bits - 1))
        nearest = np.nanmin(np.abs(steps[..., None] - grid), axis=-1)
        assert np.array_equal(np.abs(steps - codes), nearest), name
        assert not codes[2].any(), name
        assert recipe.block_rows > 1 or (scale[2] == 1).all(), name


def test_the_command_writes_a_folder_and_refuses_what_cannot_be(tmp_path, capsys):
    folder = str(folder_of("llama3", tmp_path / "bf16"))
    out = str(tmp_path / "q")
    command = ["--model", folder, "--scheme", "int8-w8a8", "--out", out]
    assert quantize.main(command) == 2  # a copy that nobody could open
    assert f"{folder}/tokenizer.json does not exist, nor does any" in capsys.readouterr().err
    assert not Path(out).exists()
    shutil.copy(BUNDLED / "tokenizer.json", folder)
    assert quantize.main(command) == 0
    assert re.search(r"q: \d+\.\d MB of weights, from \d+\.\d MB\n", capsys.readouterr().out)
    assert quantize._size(16_060_000_000) == "16.06 GB"
    for argv, message in (
        (["--model", folder, "--scheme", "int8-w8a8", "--out", out], "not an empty folder"),
        (["--model", out, "--scheme", "int8-w8a8", "--out", f"{out}2"], "quantised already"),
        (["--model", folder, "--scheme", "int4-w4a16", "--out", f"{out}2"], "whole groups of 128"),
        (["--model", folder, "--scheme", "fp8-dynamic", "--group-size", "64", "--out", f"{out}2"],
         "--group-size 64 is of int4-w4a16; fp8-dynamic has no choice"),
        (["--model", f"{folder}x", "--scheme", "int8-w8a8", "--out", f"{out}2"], "bf16x"),
    ):  # fmt: skip
        assert quantize.main(argv) == 2
        assert message in capsys.readouterr().err
    assert not Path(f"{out}2").exists()
    assert quantize.SCHEMES.keys() == RECIPES.keys()
    assert quantize._GROUP_SIZE.choices == GROUP_SIZES


def test_a_folder_of_one_file_and_an_index_is_readable_when_it_is_quantised(tmp_path):
    folder = folder_of("llama3", tmp_path / "bf16")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with safe_open(folder / "model-00001-of-00001.safetensors", "numpy") as file:
        weight_map = dict.fromkeys(file.keys(), "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantize_folder(folder, tmp_path / "q", RECIPES["int8-w8a8"], progress=ignore_progress)
    with contextlib.ExitStack() as stack:
        names = open_tensors(tmp_path / "q", stack)
    assert "model.layers.0.mlp.up_proj.weight_scale" in names and weight_map.keys() < names.keys()


def test_the_command_makes_groups_of_the_size_that_is_asked_for(tmp_path):
    """The width, 256, and the feed-forward width of the bundled model are whole groups of 64."""
    out = tmp_path / "q"
    argv = ["--model", str(BUNDLED), "--scheme", "int4-w4a16", "--group-size", "64"]
    assert quantize.main([*argv, "--out", str(out)]) == 0
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(out, stack)
        scales = tensors["model.layers.0.mlp.up_proj.weight_scale"].rows[:]
    weights = json.loads((out / "config.json").read_text())["quantization_config"]
    assert weights["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert np.asarray(scales).shape[1] == 256 // 64


def test_the_largest_group_size_that_fits_is_named(tmp_path):
    recipe = dataclasses.replace(RECIPES["int4-w4a16"], group_size=512)
    with pytest.raises(ValueError, match="not whole groups of 512; use a group size of 128, int8"):
        quantize_folder(BUNDLED, tmp_path / "q", recipe, progress=ignore_progress)
