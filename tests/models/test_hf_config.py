# SPDX-License-Identifier: Apache-2.0
"""`config.json` is mapped exactly, or refused with a message that names the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from detjax.models.config import ExpertConfig, RopeConfig, RopeKind
from detjax.models.hf_config import CHECKED_KEYS, INERT_KEYS, config_from_hf, load_config
from detjax.models.params import possible_tps
from detjax.models.registry import FAMILIES, find_family, supported_architectures

from .published_configs import LOADED, REFUSED

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "config.json").is_file())

BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {family.name: family.architectures[0] for family in FAMILIES}


def config_of(family: str = "llama", *, generation: Any = None, **keys):
    """Map a small config of one family with some keys added or replaced."""
    values = {"architectures": [ARCHITECTURES[family]], "model_type": family, **BASE, **keys}
    return config_from_hf(values, generation=generation)


# ------------------------------------------------------------------------------- what is mapped


@pytest.mark.parametrize("case", CASES)
def test_golden_folder_maps_to_its_own_values(case):
    values = json.loads((GOLDEN / case / "config.json").read_text())
    config = load_config(GOLDEN / case)
    assert config.family == values["model_type"]
    for ours, theirs in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("intermediate_size", "intermediate_size"),
        ("tie_word_embeddings", "tie_word_embeddings"),
        ("bos_token_id", "bos_token_id"),
    ):
        assert getattr(config, ours) == values[theirs], ours
    heads = values["num_attention_heads"]
    assert config.head_dim == (values.get("head_dim") or values["hidden_size"] // heads)
    residual = values.get("residual_multiplier", 1.0)
    assert config.rms_norm_eps == values["rms_norm_eps"] / residual**2
    ropes = values["rope_parameters"]
    by_window = [ropes[kind] for kind in ("full_attention", "sliding_attention") if kind in ropes]
    given = by_window or [ropes]
    for rope, keys in zip(config.ropes[: len(given)], given, strict=True):
        assert rope.theta == keys["rope_theta"]
        assert rope.kind.value == keys["rope_type"]
        assert rope.factor == keys.get("factor", 1.0)
        assert (
            rope.rotary_dim % config.head_dim
            == config.head_dim * keys.get("partial_rotary_factor", 1) % config.head_dim
        )
    context = values["max_position_embeddings"]
    is_short = config.rope.kind is RopeKind.LONGROPE
    assert config.max_position_embeddings == (
        values["original_max_position_embeddings"] if is_short else context
    )


@pytest.mark.parametrize("case", CASES)
def test_yarn_attention_factor_is_that_of_transformers(case):
    expected = json.loads((GOLDEN / case / "expected.json").read_text())
    scaling = expected["rope"]["attention_scaling"]
    assert load_config(GOLDEN / case).rope.attention_factor == pytest.approx(scaling, abs=1e-15)


@pytest.mark.parametrize("case", [c for c in CASES if (GOLDEN / c / "config_v4.json").is_file()])
def test_published_form_and_transformers_5_form_give_the_same_config(case):
    older = json.loads((GOLDEN / case / "config_v4.json").read_text())
    assert config_from_hf(older) == load_config(GOLDEN / case)


def test_golden_switches_of_every_family():
    def switches(case):
        config = load_config(GOLDEN / case)
        return config.qkv_bias, config.o_bias, config.qk_norm, set(config.sliding_windows)

    assert switches("llama3") == (False, False, False, {None})
    assert switches("llama_bias") == (True, True, False, {None})
    assert switches("mistral_v03") == (False, False, False, {None})
    assert switches("mistral_window") == (False, False, False, {24})
    assert switches("qwen2") == (True, False, False, {None})
    assert switches("qwen3") == (False, False, True, {None})


def test_qwen3_attention_bias_covers_all_four_projections():
    config = config_of("qwen3", attention_bias=True)
    assert (config.qkv_bias, config.o_bias) == (True, True)


def test_absent_keys_take_the_defaults_of_transformers():
    llama = config_from_hf({"architectures": ["LlamaForCausalLM"]})
    assert (llama.hidden_size, llama.num_heads, llama.num_kv_heads, llama.head_dim) == (
        4096,
        32,
        32,
        128,
    )
    assert (llama.rms_norm_eps, llama.rope.theta, llama.eos_token_ids) == (1e-6, 10000.0, (2,))
    mistral = config_from_hf({"architectures": ["MistralForCausalLM"]})
    assert (mistral.num_kv_heads, set(mistral.sliding_windows)) == (8, {4096})
    qwen2 = config_from_hf({"architectures": ["Qwen2ForCausalLM"]})
    assert (qwen2.vocab_size, qwen2.eos_token_ids, qwen2.bos_token_id) == (151936, (), None)
    qwen3 = config_from_hf({"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 64})
    assert qwen3.head_dim == 128, "qwen3 has its own default, not hidden_size / heads"
    moe = config_from_hf({"architectures": ["Qwen3MoeForCausalLM"]})
    assert moe.experts == ExpertConfig(
        num_experts=128, top_k=8, width=768, renormalise=False, layers=(True,) * 24
    )
    mixtral = config_from_hf({"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2})
    assert mixtral.experts == ExpertConfig(
        num_experts=8, top_k=2, width=14336, renormalise=True, layers=(True, True)
    )
    assert (mixtral.rope.theta, set(mixtral.sliding_windows)) == (1e6, {None})


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (True,) * 3),
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"mlp_only_layers": [0, 1]}, (False, False, True)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 3}, (False, False, True)),
    ],
)
def test_dense_layers_among_those_with_experts(keys, layers):
    config = config_of("qwen3_moe", **keys)
    assert config.experts is not None
    assert config.experts.layers == layers
    assert [config.has_experts(i) for i in range(3)] == list(layers)
    assert config.has_dense_layers == (not all(layers))


def test_a_model_whose_every_layer_is_dense_has_no_experts():
    assert config_of("qwen3_moe", decoder_sparse_step=4).experts is None


def test_the_number_of_experts_has_two_names():
    """The published one, and that of transformers 5."""
    older, newer = (config_of("qwen3_moe", **{k: 16}) for k in ("num_experts", "num_local_experts"))
    assert older == newer
    assert older.experts is not None and older.experts.num_experts == 16
    with pytest.raises(ValueError, match="num_experts=16 and num_local_experts=8 differ; keep one"):
        config_of("qwen3_moe", num_experts=16, num_local_experts=8)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_experts_per_tok": 9, "num_experts": 8},
            "num_experts_per_tok=9 must be at most",
        ),
        ({"num_experts": 0}, "num_experts=0 must be an integer of at least 1"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers=.3. must be a list of layers from 0 to 2"),
        ({"mlp_only_layers": 1}, "mlp_only_layers=1 must be a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer of at least 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported for 'qwen3_moe'"),
        ({"n_shared_experts": 1}, "n_shared_experts=1 is not a key that detjax knows for 'qwen3_"),
    ],
)
def test_impossible_experts_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        config_of("qwen3_moe", **keys)


def test_keys_of_experts_are_refused_for_a_dense_family():
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.1 is not a key"):
        config_of("llama", router_aux_loss_coef=0.1)
    assert config_of("mixtral", router_aux_loss_coef=0.1) == config_of("mixtral")


def test_head_dim_null_is_width_over_heads():
    assert config_of(head_dim=None).head_dim == 16
    assert config_of(head_dim=32).head_dim == 32


def test_every_inert_key_changes_nothing():
    plain = config_of()
    for key in INERT_KEYS:
        assert config_of(**{key: "anything"}) == plain, key


def test_key_lists_do_not_overlap():
    assert not INERT_KEYS & CHECKED_KEYS.keys()
    for family in FAMILIES:
        assert not family.defaults.keys() & (INERT_KEYS | CHECKED_KEYS.keys()), family.name
        assert not family.checked.keys() & (INERT_KEYS | family.defaults.keys()), family.name
        assert not family.inert & (family.checked.keys() | family.defaults.keys() | INERT_KEYS)


# ------------------------------------------------------------------------------- begin and end


@pytest.mark.parametrize(
    ("eos", "generation_eos", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [5, 2], (2, 5)),
        (None, 7, (7,)),
        (None, None, ()),
        ([4, 3], [3, 4, 9], (4, 3, 9)),
    ],
)
def test_end_tokens_are_the_union_of_both_files(tmp_path, eos, generation_eos, expected):
    values = {"architectures": ["LlamaForCausalLM"], **BASE, "eos_token_id": eos}
    (tmp_path / "config.json").write_text(json.dumps(values))
    generation = {"eos_token_id": generation_eos, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path).eos_token_ids == expected


def test_generation_config_is_optional(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert load_config(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize("bad", [320, -1, "2", [2, None], True, 2.0, [2, 320]])
def test_end_token_outside_the_vocabulary_is_refused(bad):
    with pytest.raises(ValueError, match=r"eos_token_id=.*must hold ids from 0 to vocab_size=320"):
        config_of(eos_token_id=bad)
    with pytest.raises(ValueError, match=r"eos_token_id=.*must hold ids from 0 to vocab_size=320"):
        config_of(generation={"eos_token_id": bad})


@pytest.mark.parametrize(
    ("bad_file", "other_file"),
    [("generation_config.json", "config.json"), ("config.json", "generation_config.json")],
)
def test_a_bad_end_token_is_blamed_on_its_file(tmp_path, bad_file, other_file):
    values = {"architectures": ["LlamaForCausalLM"], **BASE}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / other_file).write_text(json.dumps(values if other_file == "config.json" else {}))
    own = values if bad_file == "config.json" else {}
    (tmp_path / bad_file).write_text(json.dumps({**own, "eos_token_id": 999}))
    with pytest.raises(ValueError, match=f"{tmp_path}/{bad_file}: eos_token_id=999 must hold ids"):
        load_config(tmp_path)


def test_two_begin_tokens_are_refused():
    with pytest.raises(ValueError, match=r"bos_token_id=\[1, 2\] must be one id or null"):
        config_of(bos_token_id=[1, 2])


# ------------------------------------------------------------------------------ sliding windows


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"sliding_window": 24, "max_window_layers": 0}, (None, None, None)),
        (
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
            (24, 24, 24),
        ),
        (
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
            (None, None, 24),
        ),
        ({"use_sliding_window": True, "sliding_window": 24}, (None, None, None)),
        (
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
            (None, None, None),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (24, None, 24),
        ),
        ({"sliding_window": 24, "layer_types": ["full_attention"] * 3}, (None, None, None)),
    ],
)
def test_qwen_windows_follow_the_rules_of_transformers(family, keys, expected):
    assert config_of(family, **keys).sliding_windows == expected


def test_mistral_window_applies_to_every_layer():
    assert config_of("mistral", sliding_window=24).sliding_windows == (24, 24, 24)
    assert config_of("mistral", sliding_window=None).sliding_windows == (None, None, None)
    sliding = ["sliding_attention"] * 3
    config = config_of("mistral", sliding_window=24, layer_types=sliding)
    assert config.sliding_windows == (24, 24, 24)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 24},
            r"layer_types\[0\]='sliding_attention' contradicts the other keys",
        ),
        (
            "mistral",
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            r"layer_types\[1\]='full_attention' contradicts",
        ),
        (
            "llama",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            r"layer_types\[1\]='sliding_attention' contradicts",
        ),
        ("qwen3", {"layer_types": ["full_attention"]}, "must be a list of num_hidden_layers=3"),
        ("qwen3", {"layer_types": "full_attention"}, "must be a list of num_hidden_layers=3"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            r"layer_types\[1\]='chunked_attention' is not supported",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 must be an integer of at least 1"),
        ("mistral", {"sliding_window": 24.0}, "sliding_window=24.0 must be an integer"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window=1 must be true or false"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers=-1 must be an integer of at least"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096 is not supported for 'llama'"),
    ],
)
def test_contradicting_windows_are_refused(family, keys, message):
    with pytest.raises(ValueError, match=message):
        config_of(family, **keys)


# ------------------------------------------------------------------------------------- rotary


def rope_of(**keys) -> RopeConfig:
    return config_of(**keys).rope


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_older_and_newer_rotary_forms_agree():
    scaling = dict(LLAMA3)
    older = rope_of(rope_scaling=scaling, rope_theta=500000)
    newer = rope_of(rope_parameters={**scaling, "rope_theta": 500000.0})
    assert older == newer
    renamed = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    assert rope_of(rope_scaling=renamed, rope_theta=500000) == newer
    assert rope_of(rope_scaling={**renamed, **scaling}, rope_theta=500000) == newer


def test_rotary_defaults():
    assert rope_of() == RopeConfig(theta=10000.0)
    assert rope_of(rope_scaling=None) == RopeConfig(theta=10000.0)
    assert rope_of(rope_parameters={"rope_type": "default"}) == RopeConfig(theta=10000.0)
    assert rope_of(rope_theta=5e5, rope_parameters={}) == RopeConfig(theta=5e5)
    yarn = rope_of(rope_scaling={"type": "yarn", "factor": 4.0})
    assert yarn.kind is RopeKind.YARN
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)
    assert yarn.original_max_position == 256, "max_position_embeddings where it is absent"
    llama3 = {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}
    assert rope_of(rope_scaling=llama3).original_max_position == 256


def test_yarn_without_factor_takes_the_ratio_of_lengths():
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert rope_of(rope_scaling=yarn).factor == 4.0


def test_yarn_mscale_needs_both_values():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain = rope_of(rope_scaling=yarn).attention_factor
    assert rope_of(rope_scaling={**yarn, "mscale": 2.0}).attention_factor == plain
    assert (
        rope_of(rope_scaling={**yarn, "mscale": 2.0, "mscale_all_dim": 0}).attention_factor == plain
    )
    both = rope_of(rope_scaling={**yarn, "mscale": 2.0, "mscale_all_dim": 2.0})
    assert both.attention_factor == 1.0
    given = rope_of(rope_scaling={**yarn, "attention_factor": 1.5, "mscale": 2.0})
    assert given.attention_factor == 1.5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'.*default, lin"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope', which is not supp"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' lacks factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' lacks high_freq_factor, low_freq_factor",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5 must be a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor='4' must be a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, r"\['beta'\]=1 is not read"),
        ({"rope_scaling": {"factor": 2.0}}, r"\['factor'\]=2.0 is not read by rope_type='default'"),
        ({"rope_scaling": {**LLAMA3, "type": "yarn"}}, "type='yarn' and rope_type='llama3'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "must be above low_freq_factor"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3},
            "both rope_scaling and rope_parameters",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4},
            "rope_theta=10000.0 contradicts the 1000000.0 in rope_parameters",
        ),
        ({"rope_parameters": "default"}, "rope_parameters='default' must be an object or null"),
        ({"rope_parameters": {"full_attention": {}}}, r"\['full_attention'\]={} is not read"),
        ({"rope_theta": 0}, "rope_theta=0 must be a finite number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta=inf must be a finite number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"type": "yarn", "truncate": None}}, "truncate=None must be true or fal"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 1, "beta_slow": 2}}, "must not be below"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 0}}, "beta_fast=0 must be a finite"),
        (
            {"rope_theta": 1, "rope_scaling": {"type": "yarn"}},
            "must be above 1 for rope_type='yarn",
        ),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64.5}},
            "original_max_position_embeddings=64.5 must be an integer",
        ),
    ],
)
def test_bad_rotary_parameters_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        config_of(**keys)


# ------------------------------------------------------------------------------ what is refused


def test_unknown_key_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match=r"residual_multiplier=0.22 is not a key that .*remove it from config.json.*INERT",
    ):
        config_of(residual_multiplier=0.22)


def test_key_of_another_family_is_unknown():
    with pytest.raises(ValueError, match="max_window_layers=28 is not a key that detjax knows for"):
        config_of("llama", max_window_layers=28)
    with pytest.raises(ValueError, match="attention_bias=True is not a key.*'qwen2'"):
        config_of("qwen2", attention_bias=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("pretraining_tp", 2),
        ("use_mrope", True),
        ("is_causal", False),
        ("is_encoder_decoder", True),
        ("chunk_size_feed_forward", 64),
        ("per_layer_config", {"0": {"head_dim": 8}}),
    ],
)
def test_unsupported_value_is_refused(key, value):
    with pytest.raises(
        ValueError, match=rf"{key}=.* is not supported for 'llama'; detjax computes"
    ):
        config_of(**{key: value})
    for supported in CHECKED_KEYS[key]:
        assert config_of(**{key: supported}) == config_of()


def test_a_format_that_is_not_read_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="quant_method='hqq'.*that is not quantised"):
        config_of(quantization_config={"quant_method": "hqq"})


def test_mistral_with_biases_is_refused():
    with pytest.raises(ValueError, match="attention_bias=True is not supported for 'mistral'"):
        config_of("mistral", attention_bias=True)
    assert not config_of("mistral", attention_bias=False).qkv_bias


@pytest.mark.parametrize(
    "architectures", [["PhimoeForCausalLM"], None, [], "LlamaForCausalLM", ["LlamaModel"]]
)
def test_unknown_architecture_is_refused_with_the_list(architectures):
    with pytest.raises(ValueError, match="is not supported; detjax loads one of") as caught:
        config_from_hf({"architectures": architectures, **BASE})
    assert repr(architectures) in str(caught.value)
    for name in supported_architectures():
        assert name in str(caught.value)


def test_registry_finds_each_architecture():
    names = [name for family in FAMILIES for name in family.architectures]
    assert sorted(set(names)) == sorted(supported_architectures()) == sorted(names)
    for family, architecture in ARCHITECTURES.items():
        assert find_family([architecture]).name == family


DECODERS_OF_OTHERS = {"mimo": "qwen2"}
"""Families that transformers lacks; `test_mimo_is_qwen2_but_for_its_head` compares them."""


def test_every_family_has_a_golden_folder():
    found = {load_config(GOLDEN / case).family for case in CASES}
    assert found == set(ARCHITECTURES) - set(DECODERS_OF_OTHERS)
    assert found >= set(DECODERS_OF_OTHERS.values())


def test_model_type_must_go_with_the_architecture():
    with pytest.raises(ValueError, match="model_type='qwen2' does not go with"):
        config_of("llama", model_type="qwen2")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer of at least 1"),
        ({"hidden_size": True}, "hidden_size=True must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be an integer of at least 1"),
        ({"vocab_size": None}, "vocab_size=None must be an integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value"),
        ({"hidden_size": 66}, "hidden_size=66 must be a multiple of num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a finite number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0 must be a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.* must be a finite number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be at most 8192"),
        ({"head_dim": 10**9}, "head_dim=1000000000 must be at most 8192"),
        ({"hidden_size": 2**40}, f"hidden_size={2**40} must be at most"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None must be true or false"),
        ({"attention_bias": 0}, "attention_bias=0 must be true or false"),
    ],
)
def test_impossible_values_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        config_of(**keys)


def test_missing_or_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist; give a folder"):
        load_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON .*download it again"):
        load_config(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load_config(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"config.json must hold a JSON object, not list"):
        load_config(tmp_path)
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "odd_key": 1}))
    with pytest.raises(ValueError, match=r"config.json: odd_key=1 is not a key"):
        load_config(tmp_path)
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "generation_config.json").write_text("nonsense")
    with pytest.raises(ValueError, match=r"generation_config.json is not JSON"):
        load_config(tmp_path)


def test_files_may_begin_with_the_mark_that_windows_writes(tmp_path):
    values = {"architectures": ["LlamaForCausalLM"], **BASE}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8-sig")
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8-sig")
    assert load_config(tmp_path).eos_token_ids == (2, 7)


# --------------------------------------------------------------------------- published models


@pytest.mark.parametrize("name", LOADED)
def test_published_configs_load_with_their_context(tmp_path, name):
    values, context = LOADED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_config(tmp_path)
    assert config.max_position_embeddings == context
    text = values.get("text_config", values)
    assert config.num_layers == text["num_hidden_layers"]
    assert config.num_kv_heads == text["num_key_value_heads"]
    assert 1 in possible_tps(config)


@pytest.mark.parametrize("name", REFUSED)
def test_published_configs_are_refused_for_what_changes_a_logit(tmp_path, name):
    values, says = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as refused:
        load_config(tmp_path)
    assert says in str(refused.value)


def test_yarn_has_a_context_of_factor_times_original_and_never_less_than_the_files():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    bits = [config_of(rope_scaling=yarn, max_position_embeddings=n).rope for n in (64, 256, 512)]
    assert bits[0] == bits[1] == bits[2]
    for given, context in ((64, 256), (256, 256), (512, 512)):
        found = config_of(rope_scaling=yarn, max_position_embeddings=given)
        assert found.max_position_embeddings == context
    with pytest.raises(ValueError, match="max_position_embeddings=.* must be at most"):
        config_of(rope_scaling=yarn | {"factor": 1e30})
    linear = config_of(rope_scaling={"type": "linear", "factor": 4.0})
    assert linear.max_position_embeddings == BASE["max_position_embeddings"]
