# SPDX-License-Identifier: Apache-2.0
"""Adapters that PEFT has saved: what they compute, and what of them is refused by name."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from detjax.engine.running.device_arrays import empty_pages
from detjax.models.adapters.adapter import PEFT_PREFIX, BaseModel, read_adapter
from detjax.models.adapters.peft_config import read_peft_config
from detjax.models.adapters.program import ADAPTERS, SLOTS, adapters_of, with_adapters
from detjax.models.adapters.stack import (
    AdapterSizes,
    install_adapter,
    open_adapters,
    share_adapters,
)
from detjax.models.hf_config import load_config
from detjax.models.loading import load_model
from detjax.models.weights.reading import Reading
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal
from detjax.testing.adapters import random_adapter, write_adapter_folder
from detjax.testing.dummies import batch_of, cpu_backend, dummy_config, dummy_model, scoring_step

GOLDENS = Path(__file__).parents[1] / "golden"
CASES = tuple(sorted(path.name for path in (GOLDENS / "peft").iterdir()))
CONFIG = dummy_config()
BF16 = jnp.dtype(jnp.bfloat16)


def read(folder: Path, **options):
    return read_adapter(folder, CONFIG, **{"dtype": BF16, "max_rank": 16, **options})


@pytest.mark.quick_cases("bfloat16-regex")
@pytest.mark.golden
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_as_close_to_float64_as_those_of_peft(case, dtype):
    """Tolerance as in `test_hf_goldens`. The control: without the adapter they are far off."""
    facts = json.loads((GOLDENS / "peft" / case / "expected.json").read_text())
    with safe_open(GOLDENS / "peft" / case / "expected.safetensors", framework="np") as file:
        reference = file.get_tensor("logits_float64")
    profile = NumericsProfile(weight_dtype=dtype, compute_dtype=dtype)
    base = GOLDENS / "hf" / facts["base"]
    model = load_model(
        str(base), profile=profile, mesh=make_mesh(1, 1),
        backend=cpu_backend(load_config(base), profile),
    )  # fmt: skip
    config = model.config
    expert_rank = 16 if config.experts and not config.has_clamped_experts else 0
    model = open_adapters(model, AdapterSizes(max_loras=3, max_expert_lora_rank=expert_rank))
    model.params[ADAPTERS][SLOTS] = jnp.full(1, -1, jnp.int32)
    adapter = read_adapter(
        GOLDENS / "peft" / case, model.config, dtype=profile.param_dtype, max_rank=16,
        max_expert_rank=expert_rank,
    )  # fmt: skip
    install_adapter(model, adapter, 2)
    tokens = batch_of([(facts["ids"], 0)] * 2, np.array([[0], [1]], np.int32))
    tokens = dataclasses.replace(tokens, adapters=np.array([2, -1], np.int32))
    _, logits = scoring_step(model)(empty_pages(model, 2), tokens)
    errors = np.abs(np.asarray(logits) - reference).max(axis=(1, 2))
    allowed = facts[f"max_abs_{dtype}_minus_float64"] * (2 if dtype == "bfloat16" else 4)
    assert errors[0] <= allowed
    least = 3 if dtype == "bfloat16" else 10_000
    assert errors[1] > 0.9 * facts["max_abs_without_adapter"] > least * allowed
    jax.clear_caches()


def one_of_each_family() -> list[str]:
    """Golden folders."""
    found: dict[str, str] = {}
    for path in sorted((GOLDENS / "hf").iterdir()):
        if path.name != "gpt_oss":  # whose experts are no matrices in the file
            found.setdefault(load_config(path).family, path.name)
    return list(found.values())


def float32_logits(folder: Path, adapter: Path | None = None) -> np.ndarray:
    """Of 37 tokens."""
    profile, config = (
        NumericsProfile(weight_dtype="float32", compute_dtype="float32"),
        load_config(folder),
    )
    backend = cpu_backend(config, profile)
    model = load_model(str(folder), profile=profile, mesh=make_mesh(1, 1), backend=backend)
    rank = 16 if config.experts and not config.has_clamped_experts else 0
    model = open_adapters(model, AdapterSizes(max_loras=1, max_expert_lora_rank=rank))
    model.params[ADAPTERS][SLOTS] = jnp.full(1, -1, jnp.int32)
    if adapter is not None:
        read = read_adapter(
            adapter, config, dtype=profile.param_dtype, max_rank=16, max_expert_rank=rank
        )
        install_adapter(model, read, 0)
    tokens = batch_of([(list(range(3, 40)), 0)], np.array([[0]], np.int32))
    slots = np.array([-1 if adapter is None else 0], np.int32)
    _, logits = scoring_step(model)(
        empty_pages(model, 1), dataclasses.replace(tokens, adapters=slots)
    )
    jax.clear_caches()
    return np.asarray(logits)


def write_merged(base: Path, merged: Path, adapter: Path) -> None:
    """Write a random adapter of every module of a checkpoint, and the checkpoint with it added."""
    merged.mkdir()
    adapter.mkdir()
    (merged / "config.json").write_text((base / "config.json").read_text())
    weights = load_file(base / "model.safetensors")
    rng, tensors, names = np.random.default_rng(0), {}, []
    for name, module in BaseModel(config=load_config(base)).modules.items():
        if f"{name}.weight" not in weights:
            continue  # of an expert, where one tensor has those of all
        num_out, num_in = module.shape
        a = rng.standard_normal((4, num_in), np.float32) * num_in**-0.5
        b = rng.standard_normal((num_out, 4), np.float32) * 0.3
        tensors |= {
            f"{PEFT_PREFIX}{name}.lora_A.weight": a, f"{PEFT_PREFIX}{name}.lora_B.weight": b,
        }  # fmt: skip
        weights[f"{name}.weight"] = weights[f"{name}.weight"].astype(np.float32) + 2 * b @ a
        names.append(name)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": names}
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, adapter / "adapter_model.safetensors")
    save_file({k: v.astype(np.float32) for k, v in weights.items()}, merged / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("case", one_of_each_family())
def test_an_adapter_is_the_model_with_it_added_to_the_checkpoint(case, tmp_path, monkeypatch):
    """Both round in float32. The control: rows of B in their own order, where they change places.

    A float32 sum of these widths is wrong by some 1e-6 of its terms, and there are few layers.
    """
    base, (merged, adapter) = GOLDENS / "hf" / case, (tmp_path / name for name in ("m", "a"))
    write_merged(base, merged, adapter)
    want, plain = float32_logits(merged), float32_logits(base)
    change = np.abs(want - plain).max()
    assert change > 1
    assert np.abs(float32_logits(base, adapter) - want).max() < 1e-4 * change
    rows = BaseModel(config=load_config(base)).modules.values()
    if any(part.reading.head_order for module in rows for part in module.parts):
        monkeypatch.setattr(
            Reading, "order", property(lambda it: np.arange(it.start, it.start + it.num_rows))
        )
        moved = read_adapter(
            adapter, load_config(base), dtype=jnp.dtype(jnp.float32), max_rank=16,
            max_expert_rank=16,
        )  # fmt: skip
        monkeypatch.undo()
        monkeypatch.setattr("tests.models.test_adapters.read_adapter", lambda *a, **k: moved)
        assert np.abs(float32_logits(base, adapter) - want).max() > 0.01 * change


def test_float32_values_are_rounded_once_and_the_hash_is_of_what_is_computed_with(tmp_path):
    folder = write_adapter_folder(tmp_path / "a", CONFIG, seed=1)
    found = read(folder)
    assert found.sha256 == random_adapter(CONFIG, seed=1).sha256
    assert found.sha256 != random_adapter(CONFIG, seed=2).sha256
    twice = write_adapter_folder(tmp_path / "twice", CONFIG, seed=1, lora_alpha=32)
    assert read(twice).sha256 != found.sha256
    weights = load_file(folder / "adapter_model.safetensors")
    name = next(iter(weights))
    weights[name][0, 0] += np.float32(1e-6) * abs(weights[name][0, 0])
    save_file(weights, folder / "adapter_model.safetensors")
    assert read(folder).sha256 == found.sha256, "bfloat16 holds less"
    assert read(folder, dtype=jnp.dtype(jnp.float32)).sha256 != found.sha256


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"bias": "all"}, "bias='all'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"trainable_token_indices": [1]}, "trainable_token_indices="),
        ({"from_a_later_peft": 3}, "from_a_later_peft=3"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"r": 0}, "r=0, which is not a rank from 1 to 128"),
        ({"r": 256}, "r=256, which is not a rank"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf"),
        ({"rank_pattern": {"q_proj": "8"}}, r"rank_pattern\['q_proj'\]='8'"),
        ({"rank_pattern": {"(": 8}}, "is not a regular expression"),
        ({"target_modules": ["lm_head"]}, "targets 'lm_head'"),
        ({"target_modules": ["c_attn"]}, "names no linear module of this model"),
        ({"target_modules": ["q_proj"]}, "have no place for"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform="),
        ({"r": 4}, r"has shape \(8, 64\), and the base model and adapter_config.json make it"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(tmp_path, changed, message):
    folder = write_adapter_folder(tmp_path / "a", CONFIG, seed=1, **changed)
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_an_adapter_of_another_model_rank_or_dtype_is_refused(tmp_path):
    other = write_adapter_folder(tmp_path / "other", dummy_config(hidden_size=128), seed=1)
    with pytest.raises(ValueError, match="the adapter is of another model"):
        read(other)
    deep = write_adapter_folder(tmp_path / "deep", dummy_config(num_layers=3), seed=1)
    with pytest.raises(ValueError, match=r"holds 'base_model.model.model.layers.2"):
        read(deep)
    flat = write_adapter_folder(tmp_path / "flat", dummy_config(num_layers=1), seed=1)
    with pytest.raises(ValueError, match="lacks 14 of 28 tensors"):
        read(flat)
    folder = write_adapter_folder(tmp_path / "a", CONFIG, seed=1)
    with pytest.raises(ValueError, match="rank 8, more than max_lora_rank=4"):
        read(folder, max_rank=4)
    weights = load_file(folder / "adapter_model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] * np.inf}, folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="a value that is not finite"):
        read(folder)
    halves = {name: values.astype(np.float16) for name, values in weights.items()}
    save_file(halves, folder / "adapter_model.safetensors")
    assert read(folder, dtype=jnp.dtype(jnp.float32)).rank == 8
    of_halves = read(folder)
    rounded = {name: values.astype(ml_dtypes.bfloat16) for name, values in halves.items()}
    save_file(rounded, folder / "adapter_model.safetensors")
    assert read(folder).sha256 == of_halves.sha256
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has no adapter_model.safetensors"):
        read(folder)
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config.json"):
        read(tmp_path)


def test_modules_are_chosen_as_peft_chooses_them(tmp_path):
    folder = write_adapter_folder(
        tmp_path / "a", CONFIG, seed=1, target_modules="all-linear", exclude_modules=["v_proj"],
        layers_to_transform=1, use_rslora=True, rank_pattern={r"layers\.1.*up_proj": 2},
        alpha_pattern={"q_proj": 3},
    )  # fmt: skip
    peft = read_peft_config(folder)
    path = "model.layers.{}.self_attn.{}_proj"
    assert peft.is_target(path.format(0, "q")) and not peft.is_target("lm_head")
    assert not peft.is_target(path.format(0, "v"))
    up = "model.layers.1.mlp.up_proj"
    assert (peft.rank_of(up), peft.rank_of(path.format(1, "q"))) == (2, 8)
    assert peft.scale_of(up) == np.float32(16 / 2**0.5)
    assert peft.scale_of(path.format(0, "q")) == np.float32(3 / 8**0.5)
    listed = dataclasses.replace(peft, target_modules=("q_proj",))
    assert listed.is_target(path.format(1, "q")) and not listed.is_target(path.format(0, "q"))
    assert not listed.is_target("model.layers.1.self_attn.xq_proj")
    by_pattern = dataclasses.replace(peft, target_modules=r".*\.0\..*q_proj")
    assert by_pattern.is_target(path.format(0, "q")) and not by_pattern.is_target(up)


def test_an_adapter_of_a_model_that_sees_images_is_that_of_its_decoder(tmp_path):
    """Names as PEFT saves them of `Qwen3_5ForConditionalGeneration`, by a list and by a pattern."""
    golden, config = GOLDENS / "peft" / "linear_attention", load_config(GOLDENS / "hf" / "qwen3_5")
    want = read_adapter(golden, config, dtype=BF16, max_rank=16)
    values = json.loads((golden / "adapter_config.json").read_text())
    tensors = load_file(golden / "adapter_model.safetensors")
    inner = "base_model.model.model."
    longer = {
        inner + "language_model." + name.removeprefix(inner): value
        for name, value in tensors.items()
    }
    last = "|".join(values["target_modules"])
    for targets in (values["target_modules"], rf"model\.language_model\..*\.({last})"):
        (tmp_path / "adapter_config.json").write_text(
            json.dumps(values | {"target_modules": targets})
        )
        save_file(longer, tmp_path / "adapter_model.safetensors")
        assert read_adapter(tmp_path, config, dtype=BF16, max_rank=16).sha256 == want.sha256
    image = next(iter(tensors.values()))
    save_file(
        longer | {f"{inner}visual.a.lora_A.weight": image}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(ValueError, match=r"holds 'base_model.model.model.visual.a.lora_A.weight'"):
        read_adapter(tmp_path, config, dtype=BF16, max_rank=16)


def test_sizes_fill_whole_blocks_of_columns():
    sizes = AdapterSizes(max_loras=3, max_lora_rank=24)
    assert (sizes.rank, sizes.num_slots) == (32, 4)
    assert AdapterSizes(max_loras=1, max_lora_rank=8).num_slots == 8
    assert AdapterSizes(max_loras=5, max_lora_rank=128).num_slots == 5
    with pytest.raises(ValueError, match="max_loras=0 must be at least 1"):
        AdapterSizes(max_loras=0)
    with pytest.raises(ValueError, match="max_lora_rank=129 must be from 1 to 128"):
        AdapterSizes(max_lora_rank=129)


def test_room_for_experts_needs_experts_and_kernels():
    with pytest.raises(ValueError, match="max_expert_lora_rank=8 is of experts, and this model"):
        open_adapters(dummy_model(CONFIG), AdapterSizes(max_expert_lora_rank=8))
    with pytest.raises(ValueError, match="max_expert_lora_rank=-1 must be from 0 to 128"):
        AdapterSizes(max_expert_lora_rank=-1)
    experts = dataclasses.replace(dummy_model(EXPERTS), backend=Backend.SM90)
    with pytest.raises(ValueError, match=r"experts on backend sm90 .* rounded before an adapter"):
        open_adapters(experts, AdapterSizes(max_expert_lora_rank=8))
    clamped = dataclasses.replace(dummy_model(EXPERTS), config=load_config(GOLDENS / "hf/gpt_oss"))
    with pytest.raises(ValueError, match="experts with biases and a clamp are not supported"):
        open_adapters(clamped, AdapterSizes(max_expert_lora_rank=8))


EXPERTS = dummy_config(experts=(4, 2))


def read_experts(folder: Path, **options):
    given = {"dtype": BF16, "max_rank": 16, "max_expert_rank": 16, **options}
    return read_adapter(folder, EXPERTS, **given)


def write_experts(folder: Path, **options) -> Path:
    return write_adapter_folder(folder, EXPERTS, seed=1, has_experts=True, **options)


def test_both_layouts_of_experts_are_the_same_function(tmp_path):
    """A parameter's gates and ups share ranks: zeros stand where the other one's are."""
    modules = read_experts(write_experts(tmp_path / "modules"))
    fused = read_experts(write_experts(tmp_path / "fused", is_fused=True))
    assert modules.sha256 == random_adapter(EXPERTS, seed=1, expert_rank=8).sha256
    assert (modules.expert_rank, fused.expert_rank) == (8, 16)
    for key, one in modules.tensors.items():
        same = fused.tensors[key]
        assert one.scale == same.scale
        weights = (np.asarray(x.b, np.float32) @ np.asarray(x.a, np.float32) for x in (one, same))
        assert_bitwise_equal(*weights, claim=f"B A of {key}")


def test_sides_that_older_releases_of_peft_exchange_are_known_by_their_shapes(tmp_path):
    """PEFT before 0.19.1 gives A the outputs of a parameter, and B its inputs."""
    folder = write_experts(tmp_path / "a", is_fused=True)
    want = read_experts(folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    num_experts, exchanged = 4, dict(tensors)
    for name in tensors:
        if ".experts." not in name or ".lora_A." not in name:
            continue
        other = name.replace("lora_A", "lora_B")
        a = tensors[name].reshape(num_experts, -1, tensors[name].shape[1])
        b = tensors[other].reshape(len(tensors[other]), -1, num_experts)
        exchanged[name] = np.ascontiguousarray(b.transpose(2, 1, 0)).reshape(-1, len(b))
        exchanged[other] = np.ascontiguousarray(a.transpose(2, 1, 0)).reshape(a.shape[2], -1)
    assert sum((exchanged[name].shape != tensors[name].shape) for name in tensors) == 4
    save_file(exchanged, path)
    assert read_experts(folder).sha256 == want.sha256


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_modules": ["gate"]}, r"targets 'model.layers.1.mlp.gate'"),
        ({"target_parameters": ["mlp.experts.down"]}, r"target_parameters .* 'mlp.experts.down'"),
        ({"target_parameters": "experts"}, "target_parameters='experts', which is not a list"),
        ({"alpha_pattern": {r"experts\.1\.up_proj": 3}}, "have scales"),
    ],
)
def test_what_is_not_supported_of_experts_is_refused_by_name(tmp_path, changed, message):
    folder = write_experts(tmp_path / "a", **changed)
    with pytest.raises(ValueError, match=message):
        read_experts(folder)


def test_a_parameter_whose_side_is_no_matrix_is_refused(tmp_path):
    folder = write_experts(tmp_path / "a", is_fused=True)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts." in name)
    save_file(tensors | {name: np.ravel(tensors[name])}, path)
    with pytest.raises(ValueError, match="has shapes .* the adapter is of another model"):
        read_experts(folder)


def test_experts_need_room_of_their_own(tmp_path):
    folder = write_experts(tmp_path / "a")
    with pytest.raises(ValueError, match="experts of rank 8, more than max_expert_lora_rank=0"):
        read_experts(folder, max_expert_rank=0)
    lone = write_adapter_folder(tmp_path / "b", EXPERTS, seed=1)
    assert read_experts(lone, max_expert_rank=0).expert_rank == 0


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_a_slot_holds_what_was_installed_and_no_other_changes(tp):
    model = open_adapters(dummy_model(CONFIG, tp=tp), AdapterSizes(max_loras=8))
    first, second = (random_adapter(CONFIG, seed=seed) for seed in (1, 2))
    install_adapter(model, first, 3)
    before = model.params[ADAPTERS]["layers"][1]["down"]
    install_adapter(model, second, 5)
    stack = model.params[ADAPTERS]["layers"][1]["down"]
    a = np.asarray(stack.a).reshape(8, 16, -1)
    assert_bitwise_equal(a[5, :8], second.tensors[1, "down"].a, claim="rows of A in slot 5")
    assert_bitwise_equal(a[3], np.asarray(before.a).reshape(8, 16, -1)[3], claim="slot 3")
    assert not a[[0, 1, 2, 4, 6, 7]].astype(bool).any() and not a[:, 8:].astype(bool).any()
    b = np.asarray(stack.b).reshape(-1, 8, 16)
    assert_bitwise_equal(b[:, 5, :8], second.tensors[1, "down"].b, claim="columns of B in slot 5")
    assert np.asarray(stack.scales).tolist() == [[0, 0, 0, 2, 0, 2, 0, 0]]


def test_without_adapters_a_program_gets_the_weights_as_they_are():
    model = dummy_model(CONFIG)
    assert adapters_of(model.params, jnp.zeros(1, jnp.int32)) is None
    assert with_adapters(model.params, None) is model.params
    roomy = open_adapters(model, AdapterSizes())
    assert roomy.params["layers"] is model.params["layers"], "the weights are shared"
    assert open_adapters(model, None) is model is share_adapters(model)
    shared = share_adapters(roomy)
    install_adapter(shared, random_adapter(CONFIG, seed=1), 0)
    stack = roomy.params[ADAPTERS]["layers"][0]["qkv"]
    assert not np.asarray(stack.a).astype(bool).any(), "each engine has slots of its own"
