# SPDX-License-Identifier: Apache-2.0
"""Updates do not depend on how a step's sequences are cut: into microbatches, devices, restarts."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from detjax.models.adapters.peft_config import ALL_LINEAR
from detjax.models.config import Gating, LinearAttentionConfig, ModelConfig, NormPlacement
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.swiglu.clamp import SwigluClamp
from detjax.parallel.mesh import make_mesh
from detjax.testing import assert_bitwise_equal, assert_order_sensitive, count_different_bits
from detjax.testing.dummies import dummy_config, dummy_model
from detjax.training import trainer as trainer_module
from detjax.training.batch import Layout, Scored, aligned_runs, pack
from detjax.training.checkpoint import restore_state, save_state
from detjax.training.gradients import Backward
from detjax.training.lora import LoraConfig
from detjax.training.trainer import SubtreeSums, Trainer, TrainState

LENGTH = 70
"""More than a leaf of tokens."""

FACTS = {"fingerprint": "abc"}


@cache
def trainer(
    dp: int = 1, tp: int = 1, *, is_tied: bool = True, backward: Backward = Backward.CANONICAL,
    remat: bool = False, lora: LoraConfig | None = None,
) -> Trainer:  # fmt: skip
    config = dummy_config(num_layers=1, num_heads=4, qk_norm=True, qkv_bias=True, o_bias=True)
    model = dummy_model(dataclasses.replace(config, tie_word_embeddings=is_tied))
    return Trainer(
        model, optax.adamw(1e-2, weight_decay=0.1), mesh=make_mesh(dp, tp), clip_norm=1.0,
        remat=remat, backward=backward, lora=lora,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sequences(weighted) -> list[Scored]:
    """Eleven, which is no power of two; one is longer than a leaf."""
    return weighted(5, 71, 9, 12, 30, 7, 16, 8, 21, 6, 13)


def cut(sequences: Sequence[Scored], size: int, *, layout: Layout = Layout.PADDED):
    """Microbatches of `size`; the last has room for as many."""
    num_rows = None if layout is Layout.PADDED else size * LENGTH
    return [
        pack(sequences[i : i + size], length=LENGTH, num_sequences=size, layout=layout,
             num_rows=num_rows)
        for i in range(0, len(sequences), size)
    ]  # fmt: skip


def updated(of: Trainer, batches, *, updates: int = 1, state: TrainState | None = None):
    state, output = of.step(of.init() if state is None else state, batches)
    for _ in range(updates - 1):
        state, output = of.step(state, batches)
    return state, output


@cache
def expert_trainer(
    dp: int = 1, tp: int = 1, *, backend: Backend, backward: Backward = Backward.CANONICAL,
    lora: LoraConfig | None = None,
) -> Trainer:  # fmt: skip
    model = dummy_model(dummy_config(num_layers=1, experts=(8, 3)), backend=backend)
    return Trainer(
        model, optax.adamw(1e-2, weight_decay=0.1), mesh=make_mesh(dp, tp), clip_norm=1.0,
        remat=False, backward=backward, lora=lora,
    )  # fmt: skip


def assert_same(found: TrainState, expected: TrainState, claim: str) -> None:
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert_bitwise_equal(a, b, claim=f"{claim}: {jax.tree_util.keystr(path)}")


def num_different(found: TrainState, expected: TrainState) -> int:
    pair = jax.device_get(found.params), jax.device_get(expected.params)
    return sum(jax.tree.leaves(jax.tree.map(count_different_bits, *pair)))


@pytest.mark.slow
@pytest.mark.invariance
def test_an_update_is_bitwise_batch_invariant_and_another_order_of_sequences_is_another(sequences):
    """Two programs: microbatches of four and of one. The probe is the list in another order."""
    few = sequences[:4]
    expected, want = updated(trainer(), cut(few, 4))
    found, got = updated(trainer(), cut(few, 1))
    assert_same(found, expected, "microbatches of one")
    assert got.gradient_norm == want.gradient_norm
    logprobs = [row[: len(s.token_ids) - 1] for row, s in zip(got.logprobs, few, strict=True)]
    for i, row in enumerate(logprobs):
        start = i * LENGTH
        assert_bitwise_equal(want.logprobs[0, start : start + len(row)], row, claim="logprobs")
    turned, _ = updated(trainer(), cut([few[i] for i in (0, 2, 1, 3)], 4))
    assert num_different(turned, expected) > 0


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("dp", "tp", "size", "layout"),
    [(1, 1, 16, Layout.PACKED), (1, 1, 3, Layout.PADDED), (2, 1, 2, Layout.PADDED),
     (2, 2, 1, Layout.PADDED), (1, 2, 8, Layout.PADDED)],
)  # fmt: skip
@pytest.mark.parametrize("is_tied", [True, False])
def test_updates_are_bitwise_mesh_and_batch_invariant(dp, tp, size, layout, is_tied, sequences):
    expected, want = updated(trainer(is_tied=is_tied), cut(sequences, 1), updates=2)
    of = trainer(dp, tp, is_tied=is_tied)
    found, got = updated(of, cut(sequences, size, layout=layout), updates=2)
    assert_same(found, expected, f"({dp}, {tp}), microbatches of {size}, {layout.value}")
    assert got.gradient_norm == want.gradient_norm


OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
of_reference, of_portable = (
    functools.partial(expert_trainer, backend=backend)
    for backend in (Backend.REFERENCE, Backend.PORTABLE)
)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("make", "targets"),
    [
        pytest.param(trainer, ALL_LINEAR, id="dense"),
        pytest.param(of_reference, OF_ATTENTION, id="attention_of_a_mixture"),
        pytest.param(of_reference, ALL_LINEAR, id="experts"),
        pytest.param(of_portable, ALL_LINEAR, id="experts_portable", marks=pytest.mark.nightly),
    ],
)
def test_adapters_are_bitwise_mesh_and_batch_invariant(make, targets, sequences):
    """The probe is the list in another order; the control is XLA's backward pass."""
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=targets)
    eight, one = sequences[:8], make(lora=lora)
    expected, want = updated(one, cut(eight, 1), updates=2)
    found, got = updated(make(2, 1, lora=lora), cut(eight, 4), updates=2)
    assert_same(found, expected, "an adapter")
    assert got.gradient_norm == want.gradient_norm > 0
    turned, _ = updated(one, cut([eight[i] for i in (0, 2, 1, *range(3, 8))], 1), updates=2)
    assert num_different(turned, expected) > 0
    by_xla = make(lora=lora, backward=Backward.XLA)
    of_one, of_four = (updated(by_xla, cut(eight, size), updates=2)[0] for size in (1, 4))
    assert num_different(of_four, of_one) > 0


@pytest.mark.slow
@pytest.mark.invariance
def test_rematerialisation_changes_no_bit_of_an_update(sequences):
    expected, _ = updated(trainer(), cut(sequences, 4))
    found, _ = updated(trainer(remat=True), cut(sequences, 4))
    assert_same(found, expected, "rematerialised")


@pytest.mark.slow
@pytest.mark.control
def test_control_the_update_of_xlas_backward_depends_on_the_microbatches(sequences):
    of = trainer(backward=Backward.XLA)
    expected, _ = updated(of, cut(sequences, 1))
    found, _ = updated(of, cut(sequences, 8))
    assert num_different(found, expected) > 0


@pytest.mark.slow
@pytest.mark.invariance
def test_a_run_moved_between_meshes_has_one_hash_of_weights(sequences, tmp_path):
    """Fifty updates, stopped at random steps; each part has another mesh and other microbatches."""
    expected, _ = updated(trainer(), cut(sequences, 8), updates=50)
    rng = np.random.default_rng(5)
    stops = sorted(rng.choice(np.arange(1, 50), 3, replace=False))
    parts = [((1, 1), 1), ((4, 2), 1), ((2, 1), 8), ((1, 4), 2)]
    state = None
    for (mesh, size), (start, stop) in zip(parts, pairwise([0, *stops, 50]), strict=True):
        of = trainer(*mesh)
        if state is not None:
            save_state(tmp_path / str(start), state, facts=FACTS)
            state = restore_state(tmp_path / str(start), of, facts=FACTS)
        state, _ = updated(of, cut(sequences, size), updates=int(stop - start), state=state)
    assert state is not None
    assert_same(state, expected, "moved between meshes")


@pytest.mark.parametrize(
    ("count", "size", "shares"), [(11, 3, 1), (11, 4, 2), (5, 8, 4), (8, 1, 4)]
)
def test_runs_are_subtrees_that_cover_the_list_once(count, size, shares, weighted):
    sequences = weighted(*range(2, 2 + count))
    batches = cut(sequences, size)
    runs = aligned_runs(batches, num_shares=shares)
    covered = [(run, i) for own in runs for run in own for i in range(run.size)]
    assert [run.first + i for run, i in covered][:count] == list(range(count))
    for own in runs:
        for run in own:
            assert run.first % run.size == 0
            assert run.size == len(run.batch.lengths)
            for i in range(min(run.size, count - run.first)):
                expected = pack([sequences[run.first + i]], length=LENGTH)
                rows = slice(i * LENGTH, (i + 1) * LENGTH)
                for name in ("ids", "targets", "weights"):
                    found = getattr(run.batch, name)[rows]
                    assert_bitwise_equal(found, getattr(expected, name), claim=name)
            ids = np.asarray(batches[run.source].ids)
            assert_bitwise_equal(run.batch.ids[run.places], ids[run.rows], claim="where from")
    owners = {run.first: i for i, own in enumerate(runs) for run in own}
    assert sorted(owners.values()) == [owners[first] for first in sorted(owners)]


def test_sums_are_the_tree_of_the_list_however_it_is_cut():
    def total(*sizes: int) -> str:
        sums, start = SubtreeSums(lambda a, b: f"({a}+{b})"), 0
        for size in sizes:
            terms = [str(start + i) for i in range(size)]
            while len(terms) > 1:
                terms = [f"({a}+{b})" for a, b in zip(terms[0::2], terms[1::2], strict=True)]
            sums.add(terms[0], size=size)
            start += size
        return sums.total()

    assert total(*[1] * 8) == "(((0+1)+(2+3))+((4+5)+(6+7)))" == total(4, 2, 1, 1) == total(8)
    assert total(*[1] * 11) == total(8, 2, 1) == total(4, 4, 1, 1, 1)
    assert total(1, 1, 1) == "((0+1)+2)"
    assert_order_sensitive(np.asarray([[1e8, 1.0, -1e8, 1.0]], np.float32))


ON_CPU = [Backend.REFERENCE, Backend.PORTABLE]


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.value)
def test_updates_of_experts_are_bitwise_mesh_and_batch_invariant(backend, sequences, tmp_path):
    """Devices with steps of accumulation; then a run stopped, and continued on another mesh.

    The probe is the list in another order.
    """
    eight = sequences[:8]
    expected, want = updated(expert_trainer(backend=backend), cut(eight, 8), updates=2)
    for dp, accumulated in ((1, 4), (2, 2), (4, 2)):
        of = expert_trainer(dp, backend=backend)
        found, got = updated(of, cut(eight, 8 // dp // accumulated), updates=2)
        assert_same(found, expected, f"dp={dp}, {accumulated} steps of accumulation")
        assert got.gradient_norm == want.gradient_norm
    state, _ = updated(expert_trainer(2, backend=backend), cut(eight, 2))
    save_state(tmp_path / "1", state, facts=FACTS)
    other = expert_trainer(4, backend=backend)
    state = restore_state(tmp_path / "1", other, facts=FACTS)
    state, _ = updated(other, cut(eight, 1), state=state)
    assert_same(state, expected, "stopped, and continued on another mesh")
    turned, _ = updated(
        expert_trainer(backend=backend), cut([eight[i] for i in (0, 2, 1, *range(3, 8))], 8),
        updates=2,
    )  # fmt: skip
    assert num_different(turned, expected) > 0


def gpt_oss_like() -> ModelConfig:
    """Sinks, biases of all products, a clamped SwiGLU."""
    config = dummy_config(num_layers=1, experts=(8, 3), qkv_bias=True, o_bias=True, window=40)
    assert config.experts is not None
    clamp = SwigluClamp(alpha=1.702, limit=1.0)
    experts = dataclasses.replace(config.experts, clamp=clamp)
    return dataclasses.replace(config, experts=experts, has_sinks=True)


def gemma2_like() -> ModelConfig:
    """Soft caps, GELU, norms before and after, gains of 1 + w, a table that is used twice."""
    return dataclasses.replace(
        dummy_config(num_layers=1, num_heads=8, num_kv_heads=4),
        gating=Gating.GEGLU, norms=NormPlacement.BOTH, gain_offset=1.0, attention_softcap=2.0,
        logits_softcap=3.0, tie_word_embeddings=True,
    )  # fmt: skip


def qwen3_5_like() -> ModelConfig:
    """Gated DeltaNet, then attention with an output gate; gains of 1 + w."""
    linear = LinearAttentionConfig(
        num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=64, conv_width=4,
        layers=(True, False),
    )  # fmt: skip
    return dataclasses.replace(
        dummy_config(num_heads=8), linear_attention=linear, has_output_gate=True, gain_offset=1.0
    )


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.value)
@pytest.mark.parametrize(
    ("config", "lora", "shares_layers"),
    [
        (gpt_oss_like(), None, False), (gemma2_like(), None, True), (qwen3_5_like(), None, False),
        (gpt_oss_like(), LoraConfig(rank=5, alpha=7.5, target_modules=("q_proj", "o_proj")), False),
        (gemma2_like(), LoraConfig(rank=5, alpha=7.5), True),
    ],
    ids=["gpt_oss", "gemma2", "qwen3_5", "adapter of gpt_oss", "adapter of gemma2"],
)  # fmt: skip
def test_updates_of_families_are_bitwise_mesh_and_batch_invariant(
    config, lora, shares_layers, backend, sequences
):
    """Four devices with steps of accumulation. The probe is the list in another order.

    The control is XLA's backward pass.
    """

    def trainer_on(mesh=(1, 1), *, shares_layers: bool = False, backward=Backward.CANONICAL):
        return Trainer(
            dummy_model(config, backend=backend), optax.adamw(1e-2), mesh=make_mesh(*mesh),
            clip_norm=1.0, shares_layers=shares_layers, backward=backward, lora=lora,
        )  # fmt: skip

    mesh = 2, 2
    four, one = sequences[:4], trainer_on()
    expected, want = updated(one, cut(four, 4), updates=2)
    found, got = updated(trainer_on(mesh, shares_layers=shares_layers), cut(four, 1), updates=2)
    assert_same(found, expected, f"{mesh}, microbatches of one")
    assert got.gradient_norm == want.gradient_norm
    turned, _ = updated(one, cut([four[i] for i in (0, 2, 1, 3)], 4), updates=2)
    assert num_different(turned, expected) > 0
    of = trainer_on(backward=Backward.XLA)
    by_four, by_one = (updated(of, cut(four, size), updates=2)[0] for size in (4, 1))
    assert num_different(by_four, by_one) > 0


@pytest.mark.slow
@pytest.mark.control
@pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.value)
def test_control_the_update_of_experts_by_xlas_backward_depends_on_the_microbatches(
    backend, sequences
):
    of = expert_trainer(backend=backend, backward=Backward.XLA)
    expected, _ = updated(of, cut(sequences[:8], 8), updates=2)
    found, _ = updated(of, cut(sequences[:8], 2), updates=2)
    assert num_different(found, expected) > 0


@cache
def sharing_trainer(
    dp: int, tp: int, *, backend: Backend = Backend.PORTABLE, lora: LoraConfig | None = None,
    backward: Backward = Backward.CANONICAL,
) -> Trainer:  # fmt: skip
    """With heads of gains that all share, and tables used twice; layers are shared from tp 2 on."""
    config = dummy_config(
        num_layers=1, num_heads=8, num_kv_heads=4, qk_norm=True, qkv_bias=True, o_bias=True
    )
    model = dummy_model(dataclasses.replace(config, tie_word_embeddings=True), backend=backend)
    return Trainer(
        model, optax.adamw(1e-2, weight_decay=0.1), mesh=make_mesh(dp, tp), clip_norm=1.0,
        shares_layers=tp > 1, lora=lora, backward=backward,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=5, alpha=7.5)], ids=["weights", "adapter"])
@pytest.mark.parametrize("backend", ON_CPU, ids=lambda backend: backend.value)
def test_updates_are_bitwise_mesh_invariant_where_ranks_share_layers(
    backend, lora, sequences, tmp_path
):
    """A run of one device; of ranks that share layers; and one that is stopped between the two.

    The probe is the list in another order.
    """
    four = sequences[:4]
    trainer_on = functools.partial(sharing_trainer, backend=backend, lora=lora)
    expected, want = updated(trainer_on(1, 1), cut(four, 4), updates=2)
    for dp, tp, size in ((1, 2, 4), (2, 2, 1), (1, 4, 4)):
        of = trainer_on(dp, tp)
        found, got = updated(of, cut(four, size), updates=2)
        assert_same(found, expected, f"({dp}, {tp}), microbatches of {size}")
        assert got.gradient_norm == want.gradient_norm
        if size == 4:
            assert_bitwise_equal(got.logprobs, want.logprobs, claim=f"logprobs, tp={tp}")
    state, _ = updated(trainer_on(2, 2), cut(four, 1))
    save_state(tmp_path / "1", state, facts=FACTS)
    one = trainer_on(1, 1)
    state = restore_state(tmp_path / "1", one, facts=FACTS)
    state, _ = updated(one, cut(four, 4), state=state)
    assert_same(state, expected, "stopped on four devices, continued on one")
    turned, _ = updated(one, cut([four[i] for i in (0, 2, 1, 3)], 4), updates=2)
    assert num_different(turned, expected) > 0


UPDATES = 50


def weights_hash(state: TrainState) -> str:
    """Of every bit of the masters."""
    return bits_hash(state.params)


def bits_hash(tree: object) -> str:
    total = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(jax.device_get(tree)):
        total.update(jax.tree_util.keystr(path).encode() + np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def fifty(sequences) -> str:
    """The hash of a run on one device, each update in one microbatch."""
    return weights_hash(updated(sharing_trainer(1, 1), cut(sequences[:8], 8), updates=UPDATES)[0])


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("dp", "tp", "accumulated"),
    [
        (2, 2, 2),
        *(
            pytest.param(*layout, marks=pytest.mark.nightly)
            for layout in ((1, 1, 8), (2, 1, 1), (4, 1, 2), (1, 2, 8), (4, 2, 1))
        ),
    ],
)
def test_fifty_updates_have_one_hash_of_weights(dp, tp, accumulated, sequences, fifty):
    size = 8 // dp // accumulated
    state, _ = updated(sharing_trainer(dp, tp), cut(sequences[:8], size), updates=UPDATES)
    assert weights_hash(state) == fifty


@pytest.mark.nightly
@pytest.mark.invariance
def test_fifty_updates_stopped_at_random_steps_have_that_hash(sequences, fifty, tmp_path):
    """Each part has another mesh, tp included, and other microbatches."""
    rng = np.random.default_rng(11)
    stops = sorted(rng.choice(np.arange(1, UPDATES), 3, replace=False))
    parts = [((2, 2), 2), ((1, 1), 1), ((4, 1), 2), ((1, 2), 8)]
    state = None
    for (mesh, size), (start, stop) in zip(parts, pairwise([0, *stops, UPDATES]), strict=True):
        of = sharing_trainer(*mesh)
        if state is not None:
            save_state(tmp_path / str(start), state, facts=FACTS)
            state = restore_state(tmp_path / str(start), of, facts=FACTS)
        batches = cut(sequences[:8], size)
        state, _ = updated(of, batches, updates=int(stop - start), state=state)
    assert state is not None
    assert weights_hash(state) == fifty


@pytest.mark.slow
@pytest.mark.control
def test_control_fifty_updates_of_xlas_backward_have_a_hash_for_each_batching(sequences, fifty):
    of = sharing_trainer(1, 1, backward=Backward.XLA)
    batchings = [cut(sequences[:8], size) for size in (8, 4, 1)]
    hashes = {weights_hash(updated(of, batches, updates=UPDATES)[0]) for batches in batchings}
    assert len(hashes) == 3
    assert fifty not in hashes


@pytest.mark.slow
@pytest.mark.invariance
def test_masters_and_moments_have_one_hash_in_parts_and_whole(sequences, tmp_path, monkeypatch):
    """Three updates with state in one, two or four parts, of ranks that share layers, and whole.

    Then each stopped after the first update, and continued in the other layout. Control: the list
    in another order.
    """
    four = sequences[:4]

    def run(of: Trainer, updates: int, state: TrainState | None = None) -> TrainState:
        return updated(of, cut(four, 1), updates=updates, state=state)[0]

    expected = bits_hash(run(sharing_trainer(1, 1), 3))
    for dp, tp in ((2, 1), (4, 1), (2, 2)):
        state = run(sharing_trainer(dp, tp), 3)
        q, parts = state.params["layers"][0]["q"], dp * tp
        assert {shard.data.size for shard in q.addressable_shards} == {q.size // parts}
        assert bits_hash(state) == expected, f"({dp}, {tp})"
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "state_partition", lambda shape, num_devices: P())
        whole = sharing_trainer.__wrapped__(4, 1)
    of_layouts = [whole, sharing_trainer(4, 1)]
    for i, (first, then) in enumerate((of_layouts, of_layouts[::-1])):
        state = run(first, 1)
        q = state.params["layers"][0]["q"]
        assert {shard.data.size for shard in q.addressable_shards} == {q.size // (1, 4)[i]}
        save_state(tmp_path / str(i), state, facts=FACTS)
        state = restore_state(tmp_path / str(i), then, facts=FACTS)
        assert bits_hash(run(then, 2, state)) == expected, f"continued from layout {i}"
    turned = updated(sharing_trainer(1, 1), cut([four[i] for i in (0, 2, 1, 3)], 1), updates=3)[0]
    assert bits_hash(turned) != expected


@pytest.mark.parametrize(
    ("changes", "tp", "options", "says"),
    [
        ({"num_kv_heads": 2}, 4, {}, "cannot share num_kv_heads=2 in training; give another tp"),
        ({"intermediate_size": 48}, 2, {}, "cannot share the 1 leaves of intermediate_size=48"),
        ({"experts": (8, 3)}, 2, {}, "ranks do not share mixtures of experts in training yet"),
        ({}, 2, {"backward": Backward.XLA}, "tp=2: XLA's backward pass has no order over ranks"),
    ],
)  # fmt: skip
def test_layers_that_ranks_cannot_share_are_refused_by_name(changes, tp, options, says):
    sizes = {"num_layers": 1, "num_kv_heads": 4} | changes
    with pytest.raises(ValueError, match=says):
        Trainer(
            dummy_model(dummy_config(**sizes)), optax.sgd(1.0), mesh=make_mesh(1, tp),
            clip_norm=1.0, shares_layers=True, **options,
        )  # fmt: skip


def test_ranks_that_would_share_linear_attention_are_refused_by_name():
    with pytest.raises(ValueError, match="tp=2: ranks do not share layers of linear attention in"):
        Trainer(
            dummy_model(qwen3_5_like()), optax.sgd(1.0), mesh=make_mesh(1, 2), clip_norm=1.0,
            shares_layers=True,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.invariance
def test_two_gpus_that_share_layers_have_the_weights_of_one(sequences):
    config = dummy_config(
        num_layers=1, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=64,
        intermediate_size=1024, qk_norm=True,
    )  # fmt: skip
    states = []
    for tp in (1, 2):
        of = Trainer(
            dummy_model(config, backend=Backend.SM90), optax.adamw(1e-2),
            mesh=make_mesh(1, tp, platform=Backend.SM90.platform), clip_norm=1.0,
            shares_layers=tp > 1,
        )  # fmt: skip
        states.append(updated(of, cut(sequences[:4], 4), updates=2)[0])
    assert_same(states[1], states[0], "two GPUs")
