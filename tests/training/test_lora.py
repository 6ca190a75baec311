# SPDX-License-Identifier: Apache-2.0
"""Adapters trained: the trainer's log-probabilities are the engine's, and merging has others."""

import dataclasses
import json
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from detjax.cli.errors import BAD_INPUT, OK
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.grpo import main
from detjax.llm import LLM
from detjax.models.adapters.adapter import ADAPTED_EXPERTS, read_adapter
from detjax.models.adapters.stack import AdapterSizes, open_adapters
from detjax.models.layers import ForwardContext
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, count_different_bits
from detjax.testing.cases import quick_and_slow
from detjax.testing.dummies import dummy_model
from detjax.testing.folders import SMALL_MIXTURE, write_model_folder
from detjax.training.batch import Batch, Scored, by_sequence, pack
from detjax.training.expert_operations import expert_mlp
from detjax.training.forward import token_logprobs
from detjax.training.gradients import Backward, sums_of
from detjax.training.lora import (
    LoraConfig,
    adapter_shapes,
    adapts_experts,
    first_adapter,
    merged,
    served_adapter,
    with_adapter,
    write_adapter,
)
from detjax.training.trainer import Trainer
from detjax.training.weights import master_params

from .conftest import CONFIGS

LORA = LoraConfig(rank=5, alpha=7.5)
OF_ATTENTION = dataclasses.replace(LORA, target_modules=("q_proj", "v_proj", "o_proj"))
"""Of two of the three tensors of a matrix."""
OF_DOWN = dataclasses.replace(LORA, rank=17, target_modules=("k_proj", "down_proj"))
"""Of more than a block of ranks."""

CASES = {
    "tied": ("tied", LORA),
    "qk_norm_biases_window": ("qk_norm_biases_window", LORA),
    "attention_of_a_mixture": ("experts", OF_ATTENTION),
    "experts": ("experts", LORA),
    "one_matrix_of_experts": ("experts", OF_DOWN),
    "beside_a_shared_expert": ("shared_expert", LORA),
    "norms_before_and_behind": ("norms_before_and_behind", LORA),
    "norms_behind": ("norms_behind", LORA),
    "attention_beside_clamped_experts": ("clamped_experts", OF_ATTENTION),
}
"""Models, the mixture's first layer dense, and adapters."""

NAMES = list(CASES)


def trained(config, lora: LoraConfig = LORA, *, seed: int = 1) -> dict:
    """Masters as after some steps: no B is zero."""
    masters = first_adapter(config, lora, seed=seed)
    rng = np.random.default_rng(seed)
    for layer in masters["layers"]:
        for one in layer.values():
            one["b"] = jnp.asarray(rng.standard_normal(one["b"].shape, np.float32) * 0.4)
    return masters


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("name", "tp"),
    quick_and_slow(
        [(NAMES[0], 4)], [*((name, 4) for name in NAMES[1:]), ("experts", 1), ("experts", 8)]
    ),
)
def test_a_trainers_logprobs_are_those_of_an_engine_with_the_adapter(model_named, name, tp):
    """tp of the engine against one device. Control: the adapter merged on bfloat16 differs."""
    name, lora = CASES[name]
    config = CONFIGS[name]
    masters = trained(config, lora)
    of_experts = lora.rank if adapts_experts(config, lora) else 0
    sizes = AdapterSizes(max_loras=2, max_lora_rank=lora.rank, max_expert_lora_rank=of_experts)
    served = open_adapters(model_named(name, tp=tp), sizes)
    engine = Engine(served, EngineConfig(batch_size=2, max_len=256))
    sha = engine.add_adapter(served_adapter(masters, lora, dtype=jnp.dtype(jnp.bfloat16)))
    rng = np.random.default_rng(3)
    asked = [
        Request(
            prompt_token_ids=tuple(int(t) for t in rng.integers(0, 320, length)),
            sampling=SamplingParams(max_tokens=4, temperature=1.0, seed=length), adapter=sha,
        )
        for length in (5, 130)
    ]  # fmt: skip
    done = engine.generate(asked)
    model = model_named(name)
    ctx = ForwardContext(config=config, profile=model.profile, backend=model.backend, tp=1)
    base = master_params(model)
    rows = [
        Scored(token_ids=(ids := one.prompt_token_ids + one.token_ids), weights=(0.0,) * len(ids))
        for one in done
    ]
    batch = pack(rows, length=140)

    @jax.jit
    def logprobs(params, batch):
        return token_logprobs(ctx, params, model.rope_tables, batch, remat=True)[0]

    def answers(params) -> list[np.ndarray]:
        return [row[-4:] for row in by_sequence(batch, np.asarray(logprobs(params, batch)))]

    got = answers(with_adapter(base, masters, lora))
    for row, one in zip(got, done, strict=True):
        assert_bitwise_equal(row, np.stack(one.logprobs), claim="trainer and engine")
    other = answers(merged(base, masters, lora))
    for row, one in zip(other, done, strict=True):
        assert (row != np.stack(one.logprobs)).all()
        assert np.abs(row - np.stack(one.logprobs)).max() < 0.5, "the same function"


def rounding_bound(config, *, length: int) -> float:
    """An estimate of how much of its norm a gradient in float32 may be wrong by.

    A sum of n terms in any order is wrong by at most n 2**-24 of their magnitudes, which are here
    taken to be those of the result. A gradient passes, forward and back, the sums of each layer's
    matrices, scores and values, and those of the vocabulary.
    """
    heads, inner = config.num_heads * config.head_dim, config.intermediate_size
    forward = 2 * config.hidden_size + config.head_dim + length + heads + inner
    backward = config.hidden_size + length + config.head_dim + 3 * inner + heads
    ends = 2 * config.hidden_size + config.vocab_size
    return (config.num_layers * (forward + backward) + ends) * 2.0**-24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backward"),
    quick_and_slow(
        [(NAMES[0], Backward.CANONICAL)],
        [*((name, Backward.CANONICAL) for name in NAMES[1:]), ("experts", Backward.XLA)],
    ),
)
def test_gradients_of_an_adapter_are_those_of_the_formula(
    model_named, plain_logprobs, weighted, name, backward
):
    """Against `jax.grad` of the plain model with merged weights, in float32.

    Control: the gradient with a scale that is a hundredth larger is another.
    """
    name, lora = CASES[name]
    config = CONFIGS[name]
    masters = trained(config, lora)
    model = model_named(name, dtype="float32")
    ctx = ForwardContext(config=config, profile=model.profile, backend=model.backend, tp=1)
    base, (row,) = master_params(model), weighted(20)

    def loss(masters, batch):
        params = with_adapter(base, masters, lora)
        values = token_logprobs(
            ctx, params, model.rope_tables, batch, remat=True, backward=backward
        )[0]
        return -jnp.sum(batch.weights * values)

    def plain(masters, scale=lora.scale):
        layers = [
            weights | {n: weights[n] + scale * own[n]["b"] @ own[n]["a"] for n in own}
            for weights, own in zip(base["layers"], masters["layers"], strict=True)
        ]
        values = plain_logprobs(jnp, config, {**base, "layers": layers}, row.token_ids)
        return -jnp.sum(jnp.asarray(row.weights[1:], jnp.float32) * values)

    with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
        want, other = (jax.grad(plain)(masters, s) for s in (lora.scale, 1.01 * lora.scale))
    got = jax.jit(jax.grad(loss))(masters, pack([row], length=19))
    bound = rounding_bound(config, length=19)
    found = zip(jax.tree.leaves_with_path(got), *map(jax.tree.leaves, (want, other)), strict=True)
    for (path, a), b, c in found:
        error, shift = (np.linalg.norm(np.asarray(x) - np.asarray(b)) for x in (a, c))
        assert np.linalg.norm(b) > 0
        assert error <= bound * np.linalg.norm(b) < shift, jax.tree_util.keystr(path)


@pytest.mark.slow
@pytest.mark.invariance
def test_a_step_changes_the_adapter_alone_and_is_mesh_invariant(model_named, weighted):
    model, rows = model_named("tied"), weighted(9, 12, 7, 15)
    batches = [pack([row], length=14) for row in rows]
    states = []
    for devices in (1, 2):
        trainer = Trainer(
            model, optax.adam(1e-2), mesh=make_mesh(1, devices), clip_norm=1.0, lora=LORA
        )
        state = trainer.init()
        assert set(state.params) == {"layers"}
        for _ in range(2):
            state, output = trainer.step(state, batches)
        assert output.gradient_norm > 0
        states.append(jax.tree.map(np.asarray, state.params))
    first, second = map(jax.tree.leaves, states)
    for one, other in zip(first, second, strict=True):
        assert_bitwise_equal(one, other, claim="one device and two")
    fresh = first_adapter(model.config, LORA, seed=0)
    changed = [
        (a != np.asarray(b)).any() for a, b in zip(first, jax.tree.leaves(fresh), strict=True)
    ]
    assert all(changed)


@pytest.mark.parametrize("name", NAMES)
def test_a_written_adapter_is_the_served_one(tmp_path, name):
    name, lora = CASES[name]
    config, dtype = CONFIGS[name], jnp.dtype(jnp.bfloat16)
    masters = trained(config, lora)
    write_adapter(tmp_path / "a", masters, lora, config)
    read = read_adapter(tmp_path / "a", config, dtype=dtype, max_rank=17, max_expert_rank=17)
    assert read.sha256 == served_adapter(masters, lora, dtype=dtype).sha256


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "c_attn"), "'c_attn', and no linear module of this model ends with it; its "),
        (("lm_head",), "targets 'lm_head', and adapters of it are not supported"),
        (("gate",), "targets 'model.layers.1.mlp.gate', and adapters of it are not supported"),
        (("gate_proj",), "targets 'model.layers.1.mlp.shared_expert.gate_proj', and adapters"),
        (("experts.3.up_proj",), "names 1 of the 8 experts of layer 1, .* name all of them or"),
        ((), r"target_modules=\(\) must be 'all-linear' or a tuple of names"),
        ("q_proj", "target_modules='q_proj' must be 'all-linear' or a tuple of names"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused_by_name(targets, message):
    with pytest.raises(ValueError, match=message):
        adapter_shapes(CONFIGS["shared_expert"], dataclasses.replace(LORA, target_modules=targets))


def test_experts_with_biases_and_a_clamp_are_refused_and_attention_beside_them_is_not():
    with pytest.raises(ValueError, match=r"whose adapters are served and not trained; name modul"):
        adapter_shapes(CONFIGS["clamped_experts"], LORA)
    layers = adapter_shapes(CONFIGS["clamped_experts"], OF_ATTENTION)["layers"]
    assert [set(layer) for layer in layers] == [{"q", "v", "o"}] * 2


@cache
def gradient_of_experts(backward: Backward) -> Callable[[Batch], dict]:
    """Of an adapter of one layer's experts, whose rows, routes and cotangents are those of ids."""
    model = dummy_model(CONFIGS["experts"], backend=Backend.REFERENCE)
    ctx = ForwardContext(config=model.config, profile=model.profile, backend=model.backend, tp=1)
    rng, width = np.random.default_rng(2), model.config.hidden_size
    shapes = ((width,), jnp.bfloat16), ((3, width), jnp.bfloat16), ((8,), jnp.float32)
    tables = [jnp.asarray(rng.standard_normal((320, *shape)), dtype) for shape, dtype in shapes]
    base, masters = master_params(model), trained(model.config)

    @jax.jit
    def gradient(masters, base, batch):
        sums = sums_of(backward, batch, profile=ctx.profile, backend=ctx.backend)
        x, of_y, scores = (jnp.take(table, batch.ids, axis=0) for table in tables)
        ids = jnp.argsort(scores, axis=1)[:, :3].astype(jnp.int32)

        def loss(masters):
            weights = with_adapter(base, masters, LORA)["layers"][1]
            matrices = weights["expert_gate_up"], weights["expert_down"]
            y = expert_mlp(ctx, sums, x, ids, *matrices)
            return jnp.sum(y * of_y, dtype=jnp.float32)

        found = jax.grad(loss)(masters)["layers"][1]
        return {name: found[name] for name in ADAPTED_EXPERTS}

    return lambda batch: gradient(masters, base, batch)


@pytest.mark.invariance
def test_gradients_of_an_adapter_of_experts_are_bitwise_batch_invariant(weighted):
    """Four sequences, and each alone. Probe: another order of them; control: XLA's products."""
    sequences = weighted(5, 71, 9, 30)

    def together(order, backward=Backward.CANONICAL):
        return gradient_of_experts(backward)(pack([sequences[i] for i in order], length=70))

    def alone(backward):
        parts = [gradient_of_experts(backward)(pack([one], length=70)) for one in sequences]
        pairs = [jax.tree.map(jnp.add, *parts[i : i + 2]) for i in (0, 2)]
        return jax.tree.map(jnp.add, *pairs)

    expected = together(range(4))
    for (path, found), want in zip(
        jax.tree.leaves_with_path(alone(Backward.CANONICAL)), jax.tree.leaves(expected), strict=True
    ):
        assert_bitwise_equal(found, want, claim=f"alone: {jax.tree_util.keystr(path)}")
        assert np.asarray(want).any()
    others = (
        (together((0, 2, 1, 3)), expected),
        (alone(Backward.XLA), together(range(4), Backward.XLA)),
    )
    for pair in others:
        assert sum(jax.tree.leaves(jax.tree.map(count_different_bits, *pair))) > 0


TINY = ["--prompts", "2", "--samples", "4", "--microbatch", "8", "--batch-size", "8",
        "--no-remat", "--backend", "portable", "--rollout-tp", "1", "--steps", "3",
        "--lora-rank", "4", "--learning-rate", "1e-2"]  # fmt: skip


@pytest.fixture
def mixture(tmp_path, monkeypatch) -> list[str]:
    """Arguments for a mixture of experts, and for a reward that its random answers differ in."""
    (tmp_path / "some_rewards.py").write_text(
        "def number_of_bytes(problem, text):\n    return float(sum(text.encode()) % 7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    base = write_model_folder(tmp_path / "base", SMALL_MIXTURE, scale=0.2)
    return ["--model", str(base), "--reward", "some_rewards:number_of_bytes", "--max-prompt", "16"]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("is_mixture", [False, True], ids=["bundled", "mixture"])
def test_grpo_with_an_adapter_has_zero_kl_and_merging_has_not(tmp_path, request, is_mixture):
    """The whole loop. The adapter that it saves is trained, of experts too, and can be served."""
    base = request.getfixturevalue("mixture") if is_mixture else []
    assert main([*TINY, *base, "--output", str(tmp_path)]) == OK
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    exact = [row for row in rows if row["rollout"] == "invariant"]
    other = [row for row in rows if row["rollout"] == "merged"]
    assert [row["kl"] for row in exact] == [0.0] * 3
    assert all(row["num_different"] == 0 for row in exact)
    assert exact[0]["gradient_norm"] > 0  # the others may have rewards that are all equal
    assert other[0]["kl"] == 0, "B is zero before the first update"
    assert all(row["num_different"] > 0 for row in other[1:])
    saved = ["--rollout", "invariant", "--save", str(tmp_path / "state")]
    assert main([*TINY, *base, *saved]) == OK
    (folder,) = (tmp_path / "state").iterdir()
    options = {"model": base[1], "max_expert_lora_rank": 4} if is_mixture else {}
    llm = LLM(enable_lora=True, max_len=128, batch_size=1, show_progress=False, **options)
    assert len(llm.load_adapter(folder / "adapter")) == 64
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    of_experts = [x for name, x in tensors.items() if ".experts." in name and "lora_B" in name]
    assert len(of_experts) == (2 * 8 * 3 if is_mixture else 0)
    assert is_mixture == any(x.any() for x in of_experts)
    assert main([*TINY, *base, "--rollout", "fast"]) == BAD_INPUT


def test_modules_of_the_command_go_with_an_adapter_and_are_of_the_model(mixture, capsys):
    assert main([*mixture, "--lora-target-modules", "q_proj"]) == BAD_INPUT
    assert "--lora-target-modules is of an adapter" in capsys.readouterr().err
    assert main([*mixture, "--lora-alpha", "8"]) == BAD_INPUT
    assert "--lora-alpha is of an adapter; give --lora-rank" in capsys.readouterr().err
    for rate in ("-0.001", "0", "inf", "nan"):
        assert main([*mixture, "--learning-rate", rate]) == BAD_INPUT
        assert "must be a positive number, as updates go" in capsys.readouterr().err
    assert main([*TINY, *mixture, "--lora-target-modules", "w1"]) == BAD_INPUT
    assert "has 'w1', and no linear module of this model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lora", "backend", "tp", "says"),
    [
        (LORA, Backend.SM90, 1, "of experts on backend sm90 is not supported: its products of exp"),
        (LORA, Backend.REFERENCE, 2, "tp=2: ranks do not share mixtures"),
        (OF_ATTENTION, Backend.REFERENCE, 2, "tp=2: ranks do not share mixtures"),
    ],
)
def test_what_is_not_proven_of_experts_is_refused_with_the_reason(lora, backend, tp, says):
    model = dataclasses.replace(dummy_model(CONFIGS["experts"]), backend=backend)
    options = {"mesh": make_mesh(1, tp), "clip_norm": 1.0, "shares_layers": tp > 1}
    with pytest.raises(ValueError, match=says):
        Trainer(model, optax.sgd(1.0), lora=lora, **options)
