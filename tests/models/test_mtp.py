# SPDX-License-Identifier: Apache-2.0
"""MTP heads are read from a model's own folder as published, or refused by name.

What they draft is compared with float64 in NumPy by the published formulas. Whether a draft follows
from the right token and the right hidden state is seen with heads that know the next token.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.models.heads.features import text_states
from detjax.models.heads.head import DraftHead, draft_logits, head_pass, read_features
from detjax.models.heads.mtp import check_mtp_head, load_mtp_head
from detjax.models.heads.mtp_config import find_mtp_layout, mtp_layout_from_hf
from detjax.models.hf_config import config_from_hf, load_config
from detjax.models.hub import check_model
from detjax.models.layers import ForwardContext, Tokens
from detjax.models.loading import LoadedModel, load_model
from detjax.models.quantization.quantize import RECIPES, quantize_folder, quantize_matrix
from detjax.models.weights.files import open_tensors
from detjax.models.weights.load import ignore_progress, load_params
from detjax.models.weights.packed import has_packed
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels import portable, reference
from detjax.parallel.mesh import make_mesh
from detjax.testing.dummies import assert_same_completions, cpu_backend, dummy_config, dummy_model
from detjax.testing.folders import write_model_folder
from detjax.testing.mtp import MIMO, mtp_names, mtp_tensors, reference_mtp_drafts

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "mimo")
COPIES = {
    "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.3.shared_head.head.weight": "lm_head.weight",
}
"""What GLM-4.5's head has once more."""
WIDE = NumericsProfile(weight_dtype="float32", compute_dtype="float32")
TOKENS = tuple(int(t) for t in np.random.default_rng(0).integers(0, 256, 24))


def write(folder: Path, family: str) -> Path:
    """A model with a head; that of Qwen3.5 is the golden one."""
    if family == "mimo":
        write_model_folder(folder, MIMO, scale=0.2)
        (folder / "tokenizer_config.json").unlink()
    else:
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(GOLDEN / family / name, folder / name)
    values = json.loads((folder / "config.json").read_text())
    path = folder / "model.safetensors"
    held = load_file(path)
    if family == "glm4_moe":
        held |= {copy: held[original].copy() for copy, original in COPIES.items()}
    save_file(held | mtp_tensors(values), path)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mtp")
    return {family: write(root / family, family) for family in FAMILIES}


def load(
    folder: Path, profile: NumericsProfile = WIDE, tp: int = 1, weights: str = "auto"
) -> LoadedModel:
    backend = cpu_backend(load_config(folder), profile, tp)
    return load_model(
        str(folder), profile=profile, mesh=make_mesh(1, tp), backend=backend,
        quantized_weights=weights,
    )  # fmt: skip


def drafting(model: LoadedModel, head: DraftHead) -> Callable[[tuple[int, ...]], list[int]]:
    """From a text the draft behind it, and the one that follows from the head's own state."""
    config = head.head_config
    states_of = text_states(model, config.feature_layers, (1, len(TOKENS)))
    ctx = ForwardContext(config=config.layer, profile=model.profile, backend=model.backend, tp=1)
    num_pages, shape = 2, (config.layer.num_kv_heads, model.profile.attention_block)
    pages = jnp.zeros((1, num_pages, 2, *shape, config.layer.head_dim), model.profile.cache_dtype)
    table = jnp.arange(num_pages, dtype=jnp.int32)[None]

    def drafted(params, tables, states, tokens):
        ids = tokens[:, 1:]
        last = jnp.full(1, ids.size - 1, jnp.int32)
        given = Tokens(ids=ids, positions=jnp.arange(ids.size)[None], page_table=table)
        one_pass = partial(head_pass, ctx, config, params, tables)
        hidden = read_features(ctx, config, params, states[0, :-1])
        left, rows, hidden = one_pass(pages, given, hidden, last)
        logits_of = partial(draft_logits, ctx, params)
        first = jnp.argmax(logits_of(rows), axis=1).astype(jnp.int32)
        given = Tokens(ids=first[:, None], positions=last[:, None] + 1, page_table=table)
        _, rows, _ = one_pass(left, given, hidden, jnp.zeros(1, jnp.int32))
        return first, jnp.argmax(logits_of(rows), axis=1)

    step = jax.jit(
        jax.shard_map(
            drafted, mesh=model.mesh, in_specs=(head.partition_specs, P(), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
    )  # fmt: skip

    def drafts(tokens: tuple[int, ...]) -> list[int]:
        ids = np.array([tokens], np.int32)
        given = head.params_beside(model.params), head.rope_tables, states_of(ids)[0], ids
        return [int(draft[0]) for draft in step(*given)]

    return drafts


@pytest.mark.slow
@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_published_formulas_in_float64(
    folders, family, by_kernels, monkeypatch
):
    """By XLA's operations, and by the engine's own as on Hopper."""
    for kernels in (portable, reference):
        monkeypatch.setattr(kernels, "steps_beat_xla", by_kernels)
    folder = folders[family]
    model = load(folder)
    head, tensors = load_mtp_head(model), load_file(folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    layers = head.head_config.feature_layers
    states_of = text_states(model, layers, (1, len(TOKENS)))
    drafts, seen = drafting(model, head), set()
    for shift in range(3):
        tokens = (*TOKENS[shift:], *TOKENS[:shift])
        states = np.asarray(states_of(np.array([tokens]))[0])[0]
        expected = reference_mtp_drafts(values, tensors, states[:-1], tokens, count=2)
        assert drafts(tokens) == expected
        seen.update(expected)
    assert len(seen) > 2, "drafts that follow from the text"


@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe", "mimo"])
def test_control_the_halves_the_other_way_round_draft_something_else(folders, family):
    model = load(folders[family])
    head = load_mtp_head(model)
    drafts = drafting(model, head)
    right = drafts(TOKENS)
    join = np.asarray(head.params["join"])
    swapped = np.roll(join, join.shape[1] // 2, axis=1)
    head.params["join"] = jax.device_put(swapped, head.params["join"].sharding)
    assert drafts(TOKENS) != right


def test_every_tensor_of_a_head_is_read_once(folders):
    """All that a checkpoint has of it, and the model's own embedding, last norm and matrix."""
    model = load(folders["qwen3_5"], NumericsProfile())
    head = load_mtp_head(model)
    count = sum(int(np.prod(shape)) for shape in mtp_names(json.loads(
        (folders["qwen3_5"] / "config.json").read_text())).values())  # fmt: skip
    assert sum(value.size for value in head.params.values()) == count
    assert set(head.shared) == {"embed", "lm_head", "final_norm"}
    assert head.params["hidden_norm"].dtype == jnp.float32  # 1 is added to it
    assert head.params["join"].dtype == jnp.bfloat16
    assert head.head_config.feature_layers == (4,)


def test_a_head_that_nobody_asked_for_is_not_read(folders, tmp_path):
    """Neither a weight nor a hash of a model follows from it."""
    shutil.copyfile(GOLDEN / "qwen3_5" / "config.json", tmp_path / "config.json")
    shutil.copyfile(GOLDEN / "qwen3_5" / "model.safetensors", tmp_path / "model.safetensors")
    with_head, without = (load(one, NumericsProfile()) for one in (folders["qwen3_5"], tmp_path))
    trees = [jax.tree.leaves(one.params) for one in (with_head, without)]
    assert all(bool((a == b).all()) for a, b in zip(*trees, strict=True))


def test_mimo_is_qwen2_but_for_its_head(tmp_path):
    """The same weights by the same names give the same parameters."""
    values = json.loads((GOLDEN / "qwen2" / "config.json").read_text())
    expected = load_config(GOLDEN / "qwen2")
    named = {**values, "architectures": MIMO["architectures"], "model_type": "mimo"}
    assert dataclasses.replace(config_from_hf(named), family="qwen2") == expected
    options = {"dtype": "bfloat16", "vocab_block": 64}
    trees = []
    for folder, config in ((GOLDEN / "qwen2", expected), (tmp_path, config_from_hf(named))):
        held = load_file(GOLDEN / "qwen2" / "model.safetensors")
        if folder == tmp_path:
            held |= mtp_tensors(named)
            save_file(held, folder / "model.safetensors")
        trees.append(jax.tree.leaves(load_params(folder, config, make_mesh(1, 1), **options)))
    assert all(bool((a == b).all()) for a, b in zip(*trees, strict=True))


def changed(source: Path, folder: Path, tensors: dict | None = None, **values) -> Path:
    """A copy with other keys, and with other tensors; None leaves one out."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    merged = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: x for key, x in merged.items() if x is not None}))
    path = folder / "model.safetensors"
    merged = load_file(path) | (tensors or {})
    save_file({name: x for name, x in merged.items() if x is not None}, path)
    return folder


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2: detjax reads an MTP"),
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers=0: detjax reads"),
        ("qwen3_5", {"mtp_num_hidden_layers": True}, "mtp_num_hidden_layers=True: detjax reads"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ("qwen3_next", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2: detjax reads"),
        ("glm4_moe", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2: detjax reads"),
        ("glm4_moe", {"num_nextn_predict_layers": None, "num_mtp_layers": 2}, "num_mtp_layers=2"),
        ("mimo", {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers=3: detjax reads"),
    ],
)
def test_heads_that_are_not_supported_are_refused_by_name(
    folders, tmp_path, family, values, message
):
    folder = changed(folders[family], tmp_path / "model", **values)
    with pytest.raises(ValueError, match=message):
        find_mtp_layout(folder)
    check_model(folder)  # the model itself is
    with pytest.raises(ValueError, match=message):
        check_model(folder, head="mtp")


def test_a_model_of_a_family_without_heads_is_refused():
    with pytest.raises(ValueError, match="no 'llama' has an MTP head that detjax reads"):
        check_model("novels-6m", head="mtp")
    with pytest.raises(ValueError, match="has an MTP head that detjax reads; .* 'mimo'"):
        mtp_layout_from_hf({"architectures": ["Ernie4_5ForCausalLM"]})
    with pytest.raises(ValueError, match="random weights has no MTP head"):
        load_mtp_head(dummy_model(dummy_config()))


NORM = "mtp.norm.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (dict.fromkeys(mtp_tensors(json.loads((GOLDEN / "qwen3_5/config.json").read_text()))),
         r"has no MTP head: no tensor's name begins with 'mtp\.'"),
        ({NORM: None}, "lacks 1 of 16 tensors, such as 'mtp.norm.weight'"),
        ({NORM: np.zeros(63, np.float32)}, "mtp.norm.weight"),
        ({"mtp.layers.1.mlp.up_proj.weight": np.zeros((2, 2), np.float32)},
         "holds 'mtp.layers.1.mlp.up_proj.weight', which this model has no place for"),
        ({"mtp.fc.weight": np.zeros((64, 64), np.float32)}, r"shape \(64, 64\), but config.json"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(folders, tmp_path, tensors, message):
    folder = changed(folders["qwen3_5"], tmp_path / "model", tensors)
    with pytest.raises(ValueError, match=message):
        load_mtp_head(load(folder, NumericsProfile()))


@pytest.mark.parametrize("name", COPIES)
def test_a_head_with_an_embedding_or_a_matrix_of_its_own_is_refused(folders, tmp_path, name):
    """GLM-4.5's has them once more; bits that differ would be a head of another kind."""
    held = load_file(folders["glm4_moe"] / "model.safetensors")
    other = held[name].copy()
    other[-1, -1] += 1
    folder = changed(folders["glm4_moe"], tmp_path / "model", {name: other})
    with pytest.raises(ValueError, match=f"{name}' in .* is not '{COPIES[name]}' of the model"):
        load_mtp_head(load(folder, NumericsProfile()))
    without = changed(folders["glm4_moe"], tmp_path / "without", {name: None})
    load_mtp_head(load(without, NumericsProfile()))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe"])
def test_a_saved_model_keeps_its_head(folders, tmp_path, family):
    """Also where what was saved is saved once more."""
    model = load(folders[family], NumericsProfile())
    expected = load_mtp_head(model)
    for name in ("saved", "again"):
        model.save(tmp_path / name)
        model = load(tmp_path / name, NumericsProfile())
        found = load_mtp_head(model)
        assert found.params.keys() == expected.params.keys()
        for key, param in expected.params.items():
            assert np.asarray(found.params[key]).tobytes() == np.asarray(param).tobytes(), key
    names = mtp_names(json.loads((folders[family] / "config.json").read_text()))
    assert names.keys() <= load_file(tmp_path / "again" / "model.safetensors").keys()


# ------------------------------------------------------------------------------ quantised models

GROUP = {"group_size": 32}
FORMATS = {
    "fp8 in blocks": dataclasses.replace(RECIPES["fp8-block"], block_rows=32, **GROUP),
    "fp8-dynamic": RECIPES["fp8-dynamic"],
    "int4-w4a16": dataclasses.replace(RECIPES["int4-w4a16"], **GROUP),
}
"""The first is stored as DeepSeek and Qwen do, the others as compressed-tensors does."""


def quantised(source: Path, out: Path, kind: str, *, with_head: bool) -> Path:
    """A copy with a head that is quantised like the model, or that stays bfloat16."""
    recipe = FORMATS[kind]
    quantize_folder(source, out, recipe, progress=ignore_progress)
    path, held = out / "model.safetensors", load_file(source / "model.safetensors")
    with contextlib.ExitStack() as stack:
        tensors = {name: np.array(it.rows) for name, it in open_tensors(out, stack).items()}
    matrices = [name for name in mtp_names(MIMO) if held[name].ndim == 2] if with_head else []
    for name in matrices:
        tensors.pop(name)
        tensors |= quantize_matrix(name, held[name], recipe)
    config = json.loads((out / "config.json").read_text())
    kept = ["lm_head"] if with_head else ["lm_head", "re:model.mtp_layers.*"]
    config["quantization_config"]["ignore"] = kept
    if kind == "fp8 in blocks":
        tensors = {
            name.replace("weight_scale", "weight_scale_inv"): x for name, x in tensors.items()
        }
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [32, 32], "modules_to_not_convert": kept,
        }  # fmt: skip
    save_file(tensors, path)
    (out / "config.json").write_text(json.dumps(config))
    return out


def rounded(weight: np.ndarray, kind: str) -> np.ndarray:
    """What a quantised matrix stands for."""
    recipe, (n, k) = FORMATS[kind], weight.shape
    codes, scale = list(quantize_matrix("x.weight", weight, recipe).values())[:2]
    of_each = scale.astype(np.float32).repeat(recipe.block_rows, axis=0)[:n]
    of_each = of_each.repeat(recipe.group_size or k, axis=1)
    if not recipe.is_float:
        codes = np.clip(np.rint(weight.astype(np.float32) / of_each), -8, 7).astype(np.int8)
    return (codes.astype(np.float32) * of_each).astype(jnp.bfloat16)


@pytest.mark.parametrize("with_head", [True, False], ids=["quantised head", "bfloat16 head"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_head_of_a_quantised_model_is_the_bfloat16_head_that_it_stands_for(
    folders, tmp_path, kind, with_head
):
    source = folders["mimo"]
    found = load_mtp_head(
        load(quantised(source, tmp_path / "q", kind, with_head=with_head), NumericsProfile())
    )
    held = load_file(source / "model.safetensors")
    names = [name for name in mtp_names(MIMO) if held[name].ndim == 2 and with_head]
    plain = changed(source, tmp_path / "plain", {name: rounded(held[name], kind) for name in names})
    expected = load_mtp_head(load(plain, NumericsProfile()))
    assert found.params.keys() == expected.params.keys()
    for name, param in expected.params.items():
        assert np.asarray(found.params[name]).tobytes() == np.asarray(param).tobytes(), name
    if with_head:
        unrounded = load_mtp_head(load(source, NumericsProfile()))
        assert bool((unrounded.params["join"] != found.params["join"]).any())


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("with_head", [True, False], ids=["quantised head", "bfloat16 head"])
@pytest.mark.parametrize("kind", ["fp8 in blocks", "int4-w4a16"])
def test_a_head_of_a_quantised_model_changes_no_bit(folders, tmp_path, kind, with_head):
    folder = quantised(folders["mimo"], tmp_path / "model", kind, with_head=with_head)
    model = load(folder, NumericsProfile(), weights="packed")
    assert has_packed(model.params)
    asked = [
        Request(prompt_token_ids=TOKENS[:length], sampling=SamplingParams(max_tokens=24))
        for length in (3, 11, 24)
    ]
    sizes = {"batch_size": 2, "num_pages": 4, "max_len": 128, "self_check": "off"}
    expected = Engine(model, EngineConfig(**sizes)).generate(asked)
    config = EngineConfig(**sizes, draft_weights="mtp", verify_window=3, verify_rows=2)
    made = Engine(model, config, draft_model=load_mtp_head(model))
    assert_same_completions(made.generate(asked), expected)
    assert made.stats().drafts["mtp"].num_windows > 20


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "glm4_moe"])
def test_a_head_beside_weights_that_are_quantised_and_read_otherwise_is_the_same(
    folders, tmp_path, family
):
    """The model is expanded, and its head stands in bfloat16 in the file."""
    quantize_folder(
        folders[family], tmp_path / "q", RECIPES["fp8-dynamic"], progress=ignore_progress
    )
    plain, model = (load(it, NumericsProfile()) for it in (folders[family], tmp_path / "q"))
    assert model.quantization != plain.quantization and not has_packed(model.params)
    expected, found = load_mtp_head(plain), load_mtp_head(model)
    assert found.params.keys() == expected.params.keys()
    for name, param in expected.params.items():
        assert np.asarray(found.params[name]).tobytes() == np.asarray(param).tobytes(), name


# ------------------------------------------------------------------------------- ranks and Hopper


def test_heads_that_no_run_has_shown_are_refused_by_name(folders, tmp_path):
    """Where ranks share layers. One rank takes the same ones."""
    packed = quantised(folders["mimo"], tmp_path / "q", "int4-w4a16", with_head=True)
    for folder in (folders["glm4_moe"], packed):
        weights = "packed" if folder == packed else "auto"
        model = load(folder, NumericsProfile(), weights=weights)
        config = load_mtp_head(model).head_config
        on_ranks = dataclasses.replace(model, mesh=make_mesh(1, 2))
        with pytest.raises(ValueError, match="an MTP head .* and tp=2 is not supported"):
            check_mtp_head(config, on_ranks)


def test_ranks_do_not_share_a_head_with_experts(folders):
    with pytest.raises(ValueError, match="with a mixture of experts and tp=2 is not supported"):
        load_mtp_head(load(folders["qwen3_5_moe"], NumericsProfile(), tp=2))
