# SPDX-License-Identifier: Apache-2.0
"""An engine that gives its memory back, or takes the weights of a folder, has the bits of another.

On meshes, with tied embeddings, experts, and drafts in 8 bits.
"""

import dataclasses

import jax
import pytest

import detjax
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.sleep import AsleepError
from detjax.testing.cases import quick_and_slow
from detjax.testing.folders import write_model_folder

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256,
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 384, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
TIED = LLAMA | {"tie_word_embeddings": True}
SAMPLING = detjax.SamplingParams(max_tokens=12, temperature=1.0, seed=3)
PROMPT = list(range(100))


def opened(folder, **options) -> detjax.LLM:
    return detjax.LLM(
        str(folder), max_len=256, batch_size=4, show_progress=False, self_check="start",
        cache_dir=None, **options,
    )  # fmt: skip


def answered(llm: detjax.LLM):
    """Less the version, which counts what an engine has had."""
    completion = llm.generate([PROMPT], SAMPLING)[0].outputs[0].completion
    return dataclasses.replace(completion, weight_version=0)


@pytest.mark.slow
@pytest.mark.invariance
@pytest.mark.parametrize(
    ("config", "options"),
    quick_and_slow(
        [(LLAMA, {"tp": 2, "dp": 2})],
        [(TIED, {}), (TIED, {"tp": 2}), (LLAMA, {"mode": "dvr", "draft_weights": "int8"})],
    ),
)
def test_weights_of_a_folder_and_sleep_have_the_bits_of_a_fresh_engine(tmp_path, config, options):
    first = write_model_folder(tmp_path / "first", config, scale=0.2)
    second = write_model_folder(tmp_path / "second", config, scale=0.3)
    llm, fresh = opened(first, **options), opened(second, **options)
    old, want = answered(llm), answered(fresh)
    assert old.digest() != want.digest(), "the control: other weights answer otherwise"
    llm.engine.sleep()
    leaves = jax.tree.leaves({k: v for k, v in llm.model.params.items() if k != "exchange"})
    assert all(leaf.is_deleted() for leaf in leaves)
    with pytest.raises(AsleepError, match="without its weights"):
        answered(llm)
    llm.engine.wake_up()
    assert answered(llm) == old
    llm.engine.load_folder(second, version=1)
    assert answered(llm) == want
    assert llm.identity().model["weights"] == fresh.identity().model["weights"]
    llm.engine.sleep(keeps_weights=False)
    llm.engine.wake_up(cache=False)
    with pytest.raises(AsleepError, match="load weights first"):
        llm.engine.wake_up()
    llm.engine.load_folder(first, version=2)
    with pytest.raises(AsleepError, match="without its cache"):
        answered(llm)
    llm.engine.wake_up()
    assert answered(llm) == old
    params = llm.model.params
    assert (params["embed"] is params["lm_head"]) == (
        fresh.model.params["embed"] is fresh.model.params["lm_head"]
    )


@pytest.mark.slow
def test_an_engine_at_work_neither_sleeps_nor_changes(tmp_path):
    folder = write_model_folder(tmp_path / "first", LLAMA, scale=0.2)
    llm = opened(folder)
    want = answered(llm)
    llm.engine.add_request(PROMPT, SAMPLING)
    for change in (llm.engine.sleep, lambda: llm.engine.load_folder(folder, version=1)):
        with pytest.raises(ValueError, match="at work"):
            change()
    (output,) = [o for o in llm.engine.drain() if o.finish_reason is not None]
    assert output.finish_reason is FinishReason.LENGTH
    assert answered(llm) == want
