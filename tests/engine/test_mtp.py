# SPDX-License-Identifier: Apache-2.0
"""A model's own MTP head changes the time of an answer and no bit of it, and drafts what it should.

The hybrid has layers of linear attention, an output gate and pages of 16 tokens; the other is plain
attention with biases. Heads read and hand on what is published of Qwen3.5 and of MiMo.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from detjax.engine.config import EngineConfig, ReplicaConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import Completion
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.program_key import program_keys
from detjax.engine.running.programs import ProgramCache
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.models.config import LinearAttentionConfig
from detjax.models.heads.head import DraftHead
from detjax.models.heads.mtp import load_mtp_head
from detjax.models.heads.quantize import quantize_head
from detjax.models.loading import LoadedModel, load_model
from detjax.models.registry import family_named
from detjax.numerics import NumericsProfile
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.drafts import commit_drafts_unseen, drafts_of, every_third_wrong, mixed_requests
from detjax.testing.dummies import assert_same_completions, dummy_config, dummy_model
from detjax.testing.folders import write_model_folder
from detjax.testing.mtp import MIMO, mtp_names, mtp_tensors, random_mtp_head

VOCAB, WINDOW, PAGE = 12, 4, 16  # so small a vocabulary that some drafts are right by chance
PROFILE = NumericsProfile(attention_block=PAGE, attention_split=64)
LINEAR = LinearAttentionConfig(
    num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=16, conv_width=4, layers=(True, False)
)
SMALL = {"intermediate_size": 128, "vocab_size": VOCAB, "num_layers": 2}
CONFIGS = {
    "qwen3_5_text": dataclasses.replace(
        dummy_config(**SMALL, qk_norm=True), linear_attention=LINEAR, has_output_gate=True
    ),
    "mimo": dummy_config(**SMALL, qkv_bias=True),
}
SIZES = {
    "batch_size": 2, "prefill_chunk": PAGE, "max_len": 96, "num_pages": 24,
    "verify_window": WINDOW, "verify_rows": 2, "verify_patience": 0, "self_check": "off",
}  # fmt: skip
MTP = {"draft_weights": "mtp"}


def layout(family: str):
    found = family_named(family)
    assert found is not None and found.mtp is not None
    return found.mtp


def model_of(family: str, **mesh: int) -> LoadedModel:
    return dummy_model(CONFIGS[family], profile=PROFILE, **mesh)


@pytest.fixture(scope="module", params=list(CONFIGS))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return model_of(family)


@pytest.fixture(scope="module")
def head(model, family):
    return random_mtp_head(model, layout(family))


@pytest.fixture(scope="module")
def programs(model, head):
    return ProgramCache(model, num_pages=24, num_slots=2, window_len=WINDOW, draft_model=head)


@pytest.fixture(scope="module")
def engine(model, head, programs):
    def make(**changes) -> Engine:
        config = EngineConfig(**SIZES | changes)
        return Engine(model, config, programs=programs, draft_model=head)

    return make


def requests() -> list[Request]:
    """Prompts around a page and a chunk."""
    return mixed_requests(VOCAB, (5, 40, 16, 17, 33), max_tokens=24)


@pytest.fixture(scope="module")
def plain(engine) -> list[Completion]:
    return engine().generate(requests())


# --------------------------------------------------------------------------------------- bits


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("mode", ["invariant", "dvr"])
def test_a_head_changes_no_bit(engine, plain, mode):
    made = engine(mode=mode, **MTP)
    for _ in range(2):  # the second time prefixes, and states on their pages, are found
        assert_same_completions(made.generate(requests()), plain)
    counts = made.stats().drafts["mtp"]
    assert counts.num_windows > 20 and made.stats().prefix_tokens > 0
    assert 0.02 < counts.acceptance < 0.6, "windows of every length must have been accepted"


@pytest.mark.slow
@pytest.mark.invariance
def test_a_head_of_nans_changes_no_bit(engine, head, plain):
    host = head.take_weights_to_host()
    try:
        head.put_weights_back({name: np.full_like(w, np.nan) for name, w in host.items()})
        assert_same_completions(engine(**MTP).generate(requests()[:2]), plain[:2])
    finally:
        head.put_weights_back(host)


@pytest.mark.slow
@pytest.mark.invariance
def test_preemption_sleep_and_drafts_that_stop_and_begin_again_change_no_bit(engine):
    prompt = tuple(int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 40))
    asked = [Request(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=24))] * 2
    expected = engine().generate(asked)
    made = engine(**MTP)
    made.add_request(prompt, asked[0].sampling)
    while made.stats().num_windows < 3:
        made.step()
    (seq,) = made._scheduler.running
    made._scheduler._preempt(seq)
    assert made.drain()[-1].finish_reason is not None and made.stats().num_preempted == 1
    made.sleep()
    made.wake_up()
    assert_same_completions(made.generate(asked), expected)
    few = [asked[0], Request(prompt_token_ids=(9, 9), sampling=SamplingParams(max_tokens=9))]
    expected = engine().generate(few)
    made = engine(max_draft_batch=1, decode_steps=3, **MTP)
    assert_same_completions(made.generate(few), expected)
    assert made.stats().drafts["mtp"].num_windows > 2 and made.stats().decode_tokens > 10


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("kind", "least", "most"), [("right", 1, 1), ("half", 0.3, 0.8)])
def test_drafts_that_are_known_change_no_bit(model, head, programs, kind, least, most):
    """Windows are accepted whole, or wrong from any place on; drafts go on behind the end."""
    sampling = SamplingParams(max_tokens=50, temperature=0.9, seed=4)
    asked = [Request(prompt_token_ids=(1, 5, 2) * 8, sampling=sampling)]
    (expected,) = Engine(model, EngineConfig(**SIZES), programs=programs).generate(asked)
    text = np.array([*asked[0].prompt_token_ids, *expected.token_ids, *range(WINDOW)], np.int32)
    if kind == "half":
        text = every_third_wrong(text, VOCAB)
    known = ProgramCache(
        model, num_pages=24, num_slots=2, window_len=WINDOW, candidates=drafts_of(text),
        others=programs, draft_model=head,
    )  # fmt: skip
    made = Engine(model, EngineConfig(**SIZES, **MTP), programs=known, draft_model=head)
    assert_same_completions(made.generate(asked), [expected])
    assert least <= made.stats().drafts["mtp"].acceptance <= most


@pytest.mark.slow
@pytest.mark.control
def test_control_committing_drafts_unseen_gives_other_bits(model, head, plain, monkeypatch):
    """Acceptance by the head's own argmax, not by equality with the canonical token."""
    commit_drafts_unseen(monkeypatch)
    unsafe = ProgramCache(model, num_pages=24, num_slots=2, window_len=WINDOW, draft_model=head)
    made = Engine(model, EngineConfig(**SIZES, **MTP), programs=unsafe, draft_model=head)
    (done,) = made.generate(requests()[:1])
    assert made.stats().acceptance == 1.0
    assert done.digest() != plain[0].digest()


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_a_head_on_several_devices_changes_no_bit(family, plain, dp, tp):
    model = model_of(family, dp=dp, tp=tp)
    sizes = SIZES | {"batch_size": 2 * dp, "num_pages": 24 * dp}
    head = random_mtp_head(model, layout(family))
    made = Engine(model, EngineConfig(**sizes, **MTP), draft_model=head)
    assert_same_completions(made.generate(requests()), plain)
    counts = made.stats().drafts["mtp"]
    assert counts.num_windows > 20 and counts.accepted_tokens > 2


@pytest.mark.slow
def test_only_programs_that_are_compiled_ahead_have_run(engine, programs, plain):
    engine(**MTP).generate(requests()[:1])
    config = EngineConfig(**SIZES, **MTP)
    several = dataclasses.replace(config, decode_steps=3, max_draft_batch=1)
    dvr = dataclasses.replace(config, mode="dvr")
    ahead = {
        key
        for one in (config, several, dvr, EngineConfig(**SIZES))
        for key in program_keys(
            ReplicaConfig.of(one, dp=1, page_len=PAGE, steps_beat_xla=False)
        )
    }  # fmt: skip
    assert set(programs) <= ahead
    assert "decode fast mtp 2x3 to 6 pages" in {key.name for key in ahead}


# ------------------------------------------------------------------------- heads that must be right


CYCLE = 48
FAMILIES = ("qwen3_5", "qwen3_next", "glm4_moe", "mimo")
GOLDEN = Path(__file__).parents[1] / "golden" / "hf"


def folder_of(folder: Path, family: str) -> tuple[Path, dict]:
    """A small model without a head, and its `config.json`; all but MiMo are golden ones."""
    if family == "mimo":
        write_model_folder(folder, MIMO)
    else:
        shutil.copytree(GOLDEN / family, folder)
    return folder, json.loads((folder / "config.json").read_text())


def cyclic_folder(folder: Path, family: str, kind: str) -> Path:
    """A model whose every token is followed by the next of a cycle, with a head that knows it.

    Embeddings are unit vectors, and layers add nothing. The head goes on from the embedding that it
    reads, or from the hidden state, which is of the token before it, by two tokens.
    """
    folder, values = folder_of(folder, family)
    values |= {"vocab_size": CYCLE, "eos_token_id": None, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(values))
    width = values["hidden_size"]
    unit, step = np.eye(CYCLE, width), np.zeros((width, width))
    step[(np.arange(CYCLE) + 1) % CYCLE, np.arange(CYCLE)] = 1
    halves = [np.eye(width), 0 * step] if kind == "embedding" else [0 * step, step]
    shapes = {name: x.shape for name, x in load_file(folder / "model.safetensors").items()}
    shapes |= mtp_names(values)
    gain = float(family in ("mimo", "glm4_moe"))  # others are stored less 1
    tensors = {name: np.full(x, gain if "norm" in name else 0.0) for name, x in shapes.items()}
    tensors["model.embed_tokens.weight"] = unit
    tensors["lm_head.weight"] = unit[(np.arange(CYCLE) - 1) % CYCLE]
    joins = {"mimo": "model.mtp_layers.0.input_proj", "glm4_moe": "model.layers.3.eh_proj"}
    in_order = halves[::-1] if family == "mimo" else halves
    tensors[f"{joins.get(family, 'mtp.fc')}.weight"] = np.concatenate(in_order, axis=1)
    stored = {name: value.astype(jnp.bfloat16) for name, value in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    return folder


def load(folder: Path) -> LoadedModel:
    return load_model(
        str(folder), profile=NumericsProfile(), mesh=make_mesh(1, 1), backend=Backend.PORTABLE
    )


def acceptance(model: LoadedModel, head: DraftHead) -> float:
    """Of 3 drafts a window, behind a prompt that is no part of the cycle."""
    sizes = SIZES | {"num_pages": 4, "max_len": 128, "prefill_chunk": 8}
    made = Engine(model, EngineConfig(**sizes, **MTP), draft_model=head)
    asked = Request(
        prompt_token_ids=(7, 3, 40, 21, 9, 30, 2, 46, 11), sampling=SamplingParams(max_tokens=61)
    )
    (done,) = made.generate([asked])
    assert done.token_ids == tuple((12 + i) % CYCLE for i in range(61))
    return made.stats().drafts["mtp"].acceptance


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedding", "hidden state"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_knows_the_next_token_is_always_right(tmp_path, family, kind):
    """It would never be with the token or the hidden state of a place before or behind."""
    model = load(cyclic_folder(tmp_path / "model", family, kind))
    head, rounded = load_mtp_head(model), load_mtp_head(model)
    assert acceptance(model, head) == 1
    quantize_head(rounded, "int8")
    assert acceptance(model, rounded) == 1
    join = np.asarray(head.params["join"])
    swapped = np.roll(join, join.shape[1] // 2, axis=1)
    head.params["join"] = jax.device_put(swapped, head.params["join"].sharding)
    assert acceptance(model, head) == 0, "control: halves the other way round"


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "glm4_moe"])
def test_a_head_beside_a_mixture_of_experts_changes_no_bit(tmp_path, family):
    """Of random weights, read from the model's folder; a part of what it drafts is right."""
    folder, values = folder_of(tmp_path / "model", family)
    held = load_file(folder / "model.safetensors")
    tensors = {name: np.array(x) for name, x in (held | mtp_tensors(values)).items()}
    tensors["lm_head.weight"][CYCLE:] = 0  # few tokens, which drafts hit by chance
    save_file(tensors, folder / "model.safetensors")
    model = load(folder)
    rng = np.random.default_rng(3)
    asked = [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, CYCLE, length)),
            sampling=SamplingParams(max_tokens=24, temperature=temperature, seed=1),
        )
        for length, temperature in ((5, 0.0), (40, 0.0), (17, 0.9))
    ]
    sizes = SIZES | {"num_pages": 4, "max_len": 128}
    expected = Engine(model, EngineConfig(**sizes)).generate(asked)
    made = Engine(model, EngineConfig(**sizes, **MTP), draft_model=load_mtp_head(model))
    assert_same_completions(made.generate(asked), expected)
    counts = made.stats().drafts["mtp"]
    assert counts.num_windows > 20 and counts.draft_tokens > counts.accepted_tokens > 0


# ----------------------------------------------------------------------------------------- refusals


def test_a_head_goes_with_its_method_alone(model, head):
    with pytest.raises(ValueError, match="'eagle3' does not go with an MTP head as draft_model"):
        Engine(model, EngineConfig(**SIZES, draft_weights="eagle3"), draft_model=head)
    with pytest.raises(ValueError, match="'mtp' does not go with a model as draft_model"):
        Engine(model, EngineConfig(**SIZES, **MTP), draft_model=model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "mtp", "model": "x"}, "model='x' is not used by method='mtp'; leave"),
        ({"method": "mtp", "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be"),
    ],
)
def test_the_configuration_of_a_head_names_no_model(given, message):
    assert SpeculativeConfig.of({"method": "mtp"}).engine_options()["draft_weights"] == "mtp"
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.of(given)
