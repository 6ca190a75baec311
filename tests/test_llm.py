# SPDX-License-Identifier: Apache-2.0
"""`detjax.LLM`: the answers of the engine as text, sizes that fit, as in the command."""

import dataclasses
import gc
import json
import os
import runpy
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import tokenizers

import detjax
from detjax import generate, llm, sizing
from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.outputs.completion import CompletionOutput
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.running import launch_times, memory
from detjax.engine.scheduling.workload import Workload
from detjax.engine.speculative_config import SpeculativeConfig
from detjax.engine.trace import Trace
from detjax.models import hub
from detjax.models.bundled import bundled_model_path
from detjax.models.config import ModelConfig
from detjax.models.hf_config import load_config
from detjax.models.tokenizer import Tokenizer
from detjax.models.tokenizer_files import read_eos_id
from detjax.pallas_kernels.backend import Backend
from detjax.parallel.mesh import make_mesh
from detjax.testing.folders import write_model_folder

CONTEXT = 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
GREEDY = detjax.SamplingParams(max_tokens=12)
SAMPLED = detjax.SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=2)


def write_model(folder: Path, *, eos_token: str | None = None) -> Path:
    """A model with random weights and a token a byte; config.json says nothing of an end token."""
    ends = {"eos_token": eos_token} if eos_token else {}
    return write_model_folder(folder, CONFIG, tokenizer_config={"chat_template": TEMPLATE} | ends)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="module")
def toy(folder) -> detjax.LLM:
    return detjax.LLM(folder)


@pytest.fixture
def untyped():
    """As in a user's program, where nobody checks annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def command(capsys) -> Callable[..., dict]:
    """Run the command in this process; return its JSON."""

    def run(folder: Path, *argv: str) -> dict:
        options = ["--model", str(folder), "--format", "json", "--cache-dir", "none", *argv]
        capsys.readouterr()
        assert generate.main(options) == 0
        return json.loads(capsys.readouterr().out)

    return run


# ----------------------------------------------------------------------------------------- answers


def test_without_a_seed_one_is_drawn_for_a_call_and_is_in_outputs_and_receipts(toy):
    sampling = detjax.SamplingParams(max_tokens=6, temperature=1.0)
    first, second = toy.generate(["one", "two"], sampling), toy.generate(["one", "two"], sampling)
    seeds = {done.sampling.seed for out in first for done in out.outputs}
    assert len(seeds) == 1 and sampling.seed is None
    assert {done.sampling.seed for out in second for done in out.outputs}.isdisjoint(seeds)
    again = toy.generate(["one", "two"], first[0].outputs[0].sampling)
    for one, other in zip(first, again, strict=True):
        assert one.outputs[0].digest() == other.outputs[0].digest()
    assert {toy.receipt(out.outputs[0]).sampling.seed for out in first} == seeds
    assert toy.generate("one", GREEDY)[0].outputs[0].sampling.seed == 0


@pytest.mark.slow
def test_a_control_token_in_a_prompt_is_text_with_a_warning_and_a_token_if_asked_for(tmp_path):
    folder, text = write_model(tmp_path / "model"), "<end>"
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([text])
    backend.save(str(folder / "tokenizer.json"))
    toy = detjax.LLM(folder)
    with pytest.warns(UserWarning, match=r"^prompt 1: the control token .* is text to the model"):
        as_text = toy.generate(["one", text], GREEDY)[1].prompt_token_ids
    assert list(as_text) == toy.tokenizer.encode(text) and len(as_text) > 2
    raw, named = (
        toy.generate(text, GREEDY, **how)[0].prompt_token_ids
        for how in ({"add_special_tokens": False}, {"has_control": True})
    )
    assert list(raw) == toy.tokenizer.encode_raw(text) and len(raw) == 1
    assert list(named) == toy.tokenizer.encode(text, has_control=True)
    (scored,) = toy.score(text * 2, add_special_tokens=False)
    assert scored.prompt_token_ids == (*raw, *raw)


def test_processes_of_a_job_do_not_draw_seeds_of_their_own(toy, monkeypatch):
    monkeypatch.setattr(toy, "_num_processes", 2)
    with pytest.raises(ValueError, match="seed=None would be drawn in each of 2 processes"):
        toy.generate("one", detjax.SamplingParams(temperature=1.0))


@pytest.mark.slow
def test_an_llm_of_loaded_weights_has_their_answers_and_a_timeline(toy):
    sizes = dataclasses.replace(toy.config.engine, batch_size=1, prefill_chunk=16)
    timeline = Trace()
    other = detjax.LLM.of(
        toy.model, toy.tokenizer, dataclasses.replace(toy.config, engine=sizes), tracer=timeline
    )
    prompts = ["one", "three and four"]
    made, expected = (
        [done for out in of.generate(prompts, SAMPLED) for done in out.outputs]
        for of in (other, toy)
    )
    assert [done.digest() for done in made] == [done.digest() for done in expected]
    assert [done.text for done in made] == [done.text for done in expected]
    assert other.engine is not toy.engine and other.identity() == toy.identity()
    assert other.receipt(made[0]).token_ids == made[0].token_ids
    assert any(event["name"].startswith("decode") for event in timeline._events)


def test_each_prompt_gets_its_sequences_in_order_with_text(toy):
    outs = toy.generate(["one", "three and four"], SAMPLED)
    assert [out.prompt for out in outs] == ["one", "three and four"]
    for out in outs:
        assert out.prompt_token_ids == tuple(toy.tokenizer.encode(out.prompt))
        assert [done.index for done in out.outputs] == [0, 1]
        for done in out.outputs:
            assert len(done.token_ids) == len(done.logprobs) == SAMPLED.max_tokens
            assert done.text == toy.tokenizer.decode(done.token_ids)
            assert done.finish_reason is FinishReason.LENGTH
            assert done.fingerprint == toy.config.fingerprint
        assert out.outputs[0].digest() != out.outputs[1].digest()


@pytest.mark.invariance
def test_company_order_and_kind_of_prompt_change_no_bit(toy):
    texts = ["one", "three and four", "x" * 70]
    alone = [toy.generate(text, SAMPLED)[0] for text in texts]
    together = toy.generate(texts[::-1], [SAMPLED, GREEDY, SAMPLED])[::-1]
    ids = toy.generate([toy.tokenizer.encode(text) for text in texts], SAMPLED)
    array = toy.generate(np.asarray(toy.tokenizer.encode(texts[0])), SAMPLED)
    digests = [[done.digest() for done in out.outputs] for out in alone]
    assert [[done.digest() for done in out.outputs] for out in ids] == digests
    assert [done.digest() for done in array[0].outputs] == digests[0]
    assert [[done.digest() for done in together[i].outputs] for i in (0, 2)] == [
        digests[0], digests[2]
    ]  # fmt: skip
    assert ids[0].prompt is None and len(together[1].outputs) == 1


def test_calls_share_the_engine_and_its_programs(toy):
    toy.generate("a", GREEDY)
    engine, num_compiled = toy.engine, toy.engine.stats().num_compiled
    toy.generate(["b", "c"], GREEDY)
    assert toy.engine is engine and engine.stats().num_compiled == num_compiled > 0


def test_nothing_is_asked_and_nothing_comes(toy):
    assert toy.generate([]) == [] and toy.chat([]) == []


def test_a_chat_is_the_template_around_the_messages(toy):
    messages = [{"role": "user", "content": "Why?"}]
    (one,) = toy.chat(messages, GREEDY)
    two = toy.chat([messages, [{"role": "user", "content": "Who?"}]], GREEDY)
    (plain,) = toy.generate("[user]Why?[assistant]", GREEDY)
    assert one.prompt == "[user]Why?[assistant]" and len(two) == 2
    assert one.outputs[0].digest() == two[0].outputs[0].digest() == plain.outputs[0].digest()


def test_a_chat_goes_on_in_the_last_message_and_names_what_its_template_does_not_read(toy):
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "As"}]
    for options in ({}, {"add_generation_prompt": False}):
        (one,) = toy.chat(messages, GREEDY, continue_final_message=True, **options)
        assert one.prompt == "[user]Why?[assistant]As"
    for options, name in (
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "are both true"),
        ({"tools": "f"}, "tools='f' must be a list of dicts"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs='x' must be a dict"),
    ):
        with pytest.raises(ValueError, match=name):
            toy.chat(messages, GREEDY, **options)


def test_a_notebook_shows_the_prompt_and_a_line_of_each_answer(toy):
    (out,) = toy.generate("a" * 61, dataclasses.replace(GREEDY, n=2))
    first, *answers, last = repr(out).splitlines()
    assert first == (
        f"PromptOutput(prompt='{'a' * 57}...', num_prompt_tokens={len(out.prompt_token_ids)}, "
        "outputs=["
    )
    assert (*answers, last) == (*(f"  {answer!r}," for answer in out.outputs), "])")
    assert all(answer.digest()[:16] in repr(out) for answer in out.outputs)


def test_a_record_comes_back_from_json_with_every_bit(toy):
    sampling = dataclasses.replace(GREEDY, logprobs=2)
    done = toy.generate("a", sampling)[0].outputs[0]
    read = json.loads(json.dumps(done.as_dict()))
    assert (read["digest"], read["fingerprint"]) == (done.digest(), toy.config.fingerprint)
    assert [np.float32(p).tobytes() for p in read["logprobs"]] == [
        p.tobytes() for p in done.logprobs
    ]
    assert [len(top) for top in read["top_logprobs"]] == [2] * len(done.token_ids)
    assert CompletionOutput.from_dict(read) == done
    with pytest.raises(ValueError, match="the record was changed"):
        CompletionOutput.from_dict(read | {"token_ids": [0, *read["token_ids"][1:]]})


@pytest.mark.slow
def test_fast_is_asked_for_no_deterministic_answer(folder):
    fast = detjax.LLM(folder, mode="fast", max_len=128)
    assert "no claim" in str(fast.config)
    assert len(fast.generate("a", GREEDY)[0].outputs[0].token_ids) == GREEDY.max_tokens


# -------------------------------------------------------------------------- ends: texts and tokens


@pytest.mark.slow
def test_a_stop_string_ends_text_and_tokens_as_it_does_in_the_command(toy, folder, command):
    whole = toy.generate("ab", GREEDY)[0].outputs[0]
    stop = toy.tokenizer.decode(whole.token_ids[4:6])
    assert len(stop) >= 1
    begin = whole.text.index(stop)
    done = toy.generate("ab", dataclasses.replace(GREEDY, stop=(stop,)))[0].outputs[0]
    assert done.text == whole.text[:begin]
    assert done.token_ids == whole.token_ids[: len(done.token_ids)]
    assert 0 < len(done.token_ids) <= 6 and done.finish_reason is FinishReason.STOP
    (entry,) = command(folder, "--prompt", "ab", "--max-tokens", "12", f"--stop={stop}")[
        "completions"
    ]
    assert (entry["digest"], entry["text"]) == (done.digest(), done.text)


def test_an_engine_refuses_stop_strings_which_it_cannot_see(toy):
    sampling = dataclasses.replace(GREEDY, stop=("x",))
    with pytest.raises(ValueError, match="knows tokens, not text: ask detjax.LLM"):
        toy.engine.generate([Request(prompt_token_ids=(1,), sampling=sampling)])
    with pytest.raises(ValueError, match=r"has stop=\('x',\)"):
        toy.engine.add_request((1,), sampling)


@pytest.mark.slow
def test_an_end_token_of_the_tokenizer_alone_ends_api_llm_and_command_alike(
    toy, folder, tmp_path, command
):
    """config.json names none; tokenizer_config.json does."""
    whole = toy.generate("ab", GREEDY)[0].outputs[0].token_ids
    assert len(whole) == GREEDY.max_tokens
    at = next(i for i in range(2, len(whole)) if whole[i] not in whole[:i])
    ended = write_model(tmp_path / "ended", eos_token=toy.tokenizer.backend.id_to_token(whole[at]))
    assert "eos_token_id" not in json.loads((ended / "config.json").read_text())
    assert read_eos_id(ended) == Tokenizer.from_folder(ended).eos_id == whole[at]
    expected = whole[: at + 1]

    model = detjax.load_model(
        str(ended),
        profile=detjax.NumericsProfile(),
        mesh=make_mesh(1, 1),
        backend=toy.model.backend,
    )
    sizes = toy.config.engine
    engine = detjax.Engine(model, sizes)
    request = Request(prompt_token_ids=tuple(toy.tokenizer.encode("ab")), sampling=GREEDY)
    (by_engine,) = engine.generate([request])
    by_llm = detjax.LLM(ended).generate("ab", GREEDY)[0].outputs[0]
    (by_command,) = command(ended, "--prompt", "ab", "--max-tokens", "12")["completions"]
    assert by_engine.token_ids == by_llm.token_ids == tuple(by_command["token_ids"]) == expected
    assert by_engine.digest() == by_llm.digest() == by_command["digest"]
    assert by_engine.finish_reason is by_llm.finish_reason is FinishReason.STOP
    assert by_command["finish_reason"] == "stop"


def test_an_end_token_by_its_number_in_added_tokens_or_none(tmp_path):
    folder = shutil.copytree(bundled_model_path(), tmp_path / "model")
    assert read_eos_id(folder) == 1 and load_config(folder).eos_token_ids == (1,)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {"1": {"content": config["eos_token"]}}
    changed = json.dumps(config | {"added_tokens_decoder": added})
    (folder / "tokenizer_config.json").write_text(changed)
    assert read_eos_id(folder) == 1
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": 7}))
    with pytest.raises(ValueError, match="is malformed"):
        load_config(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<none>"}))
    with pytest.raises(ValueError, match="names the token '<none>'"):
        load_config(folder)
    (folder / "tokenizer_config.json").unlink()
    assert read_eos_id(folder) is None


# ------------------------------------------------------------------------------------------- sizes


def test_what_was_chosen_is_shown(toy):
    shown = str(toy.config)
    assert toy.config.engine.max_len == CONTEXT and toy.config.engine.num_pages == 16
    for part in (
        "backend     reference (",
        "dp 1 x tp 1",
        "room for 256",
        "16 pages",
        "fingerprint",
    ):
        assert part in shown
    assert repr(toy).startswith("LLM('") and repr(toy).endswith("', dp=1, tp=1)")


def test_what_is_asked_for_is_taken(folder):
    made = detjax.LLM(
        str(folder), dp=2, tp=2, batch_size=4, prefill_chunk=16, max_len=200, num_pages=8,
        verify_window=9, dtype="float32", show_progress=False,
    )  # fmt: skip
    engine = made.config.engine
    assert (engine.batch_size, engine.prefill_chunk, engine.max_len) == (4, 16, 200)
    assert (engine.num_pages, engine.verify_window) == (8, 9)
    assert (made.config.dp, made.config.tp, made.model.mesh.size) == (2, 2, 4)
    assert made.config.profile.weight_dtype == made.config.profile.compute_dtype == "float32"


def test_max_len_is_what_the_cache_holds(folder):
    made = detjax.LLM(folder, num_pages=1, batch_size=1)
    assert made.config.engine.max_len == 128
    with pytest.raises(
        ValueError,
        match="130 tokens and its answer 1, more than the engine's max_len",
    ):
        made.generate("x" * 130)
    with pytest.raises(ValueError, match="max_len=200 takes 2 pages of 128 tokens, and a replica"):
        detjax.LLM(folder, num_pages=1, batch_size=1, max_len=200)


def test_the_cache_of_a_cpu_is_bounded(toy, monkeypatch):
    ask = {"gpu_memory_utilization": 0.9, "draft_weights": "full"}
    a_page = memory.cache_bytes(toy.model, 1)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 40 * a_page)
    assert memory.pages_that_fit(toy.model, **ask) == 10
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 7 * a_page)
    assert memory.pages_that_fit(toy.model, **ask) == 7
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", a_page - 1)
    with pytest.raises(ValueError, match="of a device for the cache, and a page takes"):
        memory.pages_that_fit(toy.model, **ask)


def test_the_cache_of_a_gpu_is_what_the_weights_leave_of_the_share(monkeypatch):
    stats = [{"bytes_limit": 1000}, {"bytes_limit": 990}]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert memory.gpu_room(stats, [300, 320], gpu_memory_utilization=0.9) == 891 - 320
    assert memory.gpu_room(stats, [300, 320], gpu_memory_utilization=1) == 891 - 320
    assert memory.gpu_room(stats, [0, 320], gpu_memory_utilization=0.45) == 445 - 320
    # Without the variable JAX has taken 75 %: 990 of 1320.
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert memory.gpu_room(stats, [300, 320], gpu_memory_utilization=0.9) == 891 - 320
    assert memory.gpu_room(stats, [0, 320], gpu_memory_utilization=0.5) == 594 - 320
    with pytest.raises(ValueError, match="JAX does not say how much memory the GPU has"):
        memory.gpu_room([{}], [0], gpu_memory_utilization=0.9)


def test_a_cache_is_no_larger_than_what_is_left_in_one_region(monkeypatch):
    """As seen on an H200 whose 126 GiB JAX took in regions: 16 of weights lay in one of 32."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # benchmarks set it, too
    grows = {"bytes_limit": 126, "pool_bytes": 32, "largest_free_block_bytes": 15}
    assert memory.gpu_room([grows], [16], gpu_memory_utilization=0.9) == 94
    whole = grows | {"pool_bytes": 126, "largest_free_block_bytes": 109}
    assert memory.gpu_room([whole], [16], gpu_memory_utilization=0.9) == 113 - 16
    # An earlier cache is free again: its region is the allocator's still.
    freed = grows | {"pool_bytes": 120, "largest_free_block_bytes": 88}
    assert memory.gpu_room([freed], [16], gpu_memory_utilization=0.9) == 88


def test_a_cache_that_fits_in_no_region_is_refused(toy, monkeypatch):
    a_page = memory.cache_bytes(toy.model, 1)
    stats = {
        "bytes_limit": 20 * a_page, "pool_bytes": 8 * a_page, "largest_free_block_bytes": a_page,
    }  # fmt: skip
    device = Mock(platform="gpu", memory_stats=lambda: stats)
    mesh = Mock(local_devices=[device], size=1)
    monkeypatch.setattr(memory, "held_bytes", lambda model: {device: a_page})
    monkeypatch.setattr(memory, "cache_bytes", lambda model, pages, *_, **__: pages * a_page)
    model = Mock(mesh=mesh, profile=toy.model.profile)
    memory.check_memory(model, EngineConfig(num_pages=12, max_len=8))
    with pytest.raises(ValueError, match="a region that XLA_PYTHON_CLIENT_PREALLOCATE=false"):
        memory.check_memory(model, EngineConfig(num_pages=13, max_len=8))


def test_what_a_device_holds_is_what_its_arrays_take(toy):
    """A buffer that two arrays share counts once; one that is gone does not."""
    first = toy.model.mesh.local_devices[0]
    gc.collect()
    before = memory.held_bytes(toy.model)[first]
    assert before >= sum(p.nbytes for p in jax.tree.leaves(toy.model.params))
    one = jax.block_until_ready(jax.device_put(np.arange(4096.0), first))
    same = jax.make_array_from_single_device_arrays(one.shape, one.sharding, [one])
    other = jax.block_until_ready(jax.device_put(np.ones(64), jax.devices()[1]))
    assert one.unsafe_buffer_pointer() == same.unsafe_buffer_pointer()
    assert memory.held_bytes(toy.model)[first] == before + one.nbytes
    assert memory.held_bytes(toy.model)[first] == before + one.nbytes
    del one, same, other
    assert memory.held_bytes(toy.model)[first] == before


def test_room_that_differs_by_a_little_holds_the_same_number_of_pages(toy, monkeypatch):
    ask = {"gpu_memory_utilization": 0.9, "draft_weights": "full"}
    step, a_page = memory.ROOM_STEP_BYTES, memory.cache_bytes(toy.model, 1)
    rooms = [3 * step, 3 * step + 5 * a_page, 4 * step - 1, 4 * step]
    found = []
    for room in rooms:
        monkeypatch.setattr(memory, "CPU_CACHE_BYTES", room)
        monkeypatch.setattr(memory, "free_host_bytes", lambda: 2**40)
        found.append(memory.pages_that_fit(toy.model, **ask))
    assert found == [3 * step // a_page] * 3 + [4 * step // a_page]


@pytest.fixture
def gpu(toy, monkeypatch) -> Callable[..., EngineConfig]:
    """Choose sizes for a GPU on which so many pages fit: (fitting, asked, work=, dp=).

    The model has positions for what is asked.
    """
    long = dataclasses.replace(toy.model.config, max_position_embeddings=4096)

    def choose(
        fitting: int,
        asked: dict,
        *,
        work: Workload | None = None,
        dp: int = 1,
        config: ModelConfig = long,
    ) -> EngineConfig:
        monkeypatch.setattr(sizing, "pages_that_fit", lambda *_, **__: fitting)
        most = max(
            config.max_position_embeddings, asked.get("max_len", 0), work.longest if work else 0
        )
        config = dataclasses.replace(config, max_position_embeddings=most)
        model = dataclasses.replace(
            toy.model, backend=Backend.SM90, config=config, mesh=make_mesh(dp, 1)
        )
        return sizing.choose_sizes(model, asked, gpu_memory_utilization=0.9, work=work)

    return choose


@pytest.mark.parametrize(
    ("fitting", "asked", "batch_size"),
    [
        (4096, {}, 512),
        (4095, {}, 256),
        (1024, {"max_len": 256}, 512),  # nobody has more than two pages
        (1023, {"max_len": 256}, 256),
        (4096, {"max_prefill_streak": 0}, 256),  # as a server asks
        (4096, {"batch_size": 32}, 32),
    ],
)
def test_the_slots_of_a_gpu_follow_its_memory(gpu, fitting, asked, batch_size):
    sizes = gpu(fitting, asked)
    assert (sizes.batch_size, sizes.num_pages) == (batch_size, fitting)
    assert sizes.decode_batches == tuple(b for b in (1, 8, 16, 64, 128, 256) if b < batch_size)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("fitting", [6000, 3000])
def test_many_prompts_of_one_command_run_as_those_of_an_llm(gpu, fitting, dp):
    """The LLM is told the length; the command counts it."""
    work = Workload(num_sequences=512 * dp, longest=1024, longest_prompt=896)
    of_command = gpu(fitting * dp, {}, work=work, dp=dp)
    assert of_command == dataclasses.replace(
        gpu(fitting * dp, {"max_len": 1024}, dp=dp),
        num_pages=min(fitting, of_command.batch_size // dp * 8) * dp,
    )
    assert of_command.batch_size == (512 if fitting == 6000 else 256) * dp
    assert (of_command.prefill_chunk, of_command.max_prefill_streak) == (512, 64)
    assert of_command.prefill_shapes == ((4, 512),)


@pytest.mark.parametrize(
    ("num_sequences", "batch_size", "decode_batches"),
    [
        (1, 1, ()),
        (2, 8, (1,)),
        (17, 64, (1, 8, 16)),
        (256, 256, (1, 8, 16, 64, 128)),
        (257, 512, (1, 8, 16, 64, 128, 256)),
        (9999, 512, (1, 8, 16, 64, 128, 256)),
    ],
)
def test_less_work_is_done_with_fewer_slots_and_pages(
    gpu, num_sequences, batch_size, decode_batches
):
    work = Workload(num_sequences=num_sequences, longest=300, longest_prompt=5)
    sizes = gpu(6000, {}, work=work)
    assert (sizes.batch_size, sizes.decode_batches) == (batch_size, decode_batches)
    assert (sizes.max_len, sizes.num_pages) == (512, 4 * batch_size)
    assert sizes.prefill_chunk == 64
    assert sizes.prefill_shapes == (((4, 64),) if batch_size > 4 else ())


@pytest.mark.parametrize(
    ("longest_prompt", "batch_size", "shapes"),
    [
        (1535, 8, ((4, 512),)),
        (1536, 8, ((4, 512), (1, 2048))),
        (1536, 1, ((1, 2048),)),
        (4000, 256, ((4, 512), (1, 2048))),
    ],
)
def test_a_long_prompt_has_a_larger_prefill(gpu, longest_prompt, batch_size, shapes):
    work = Workload(num_sequences=1, longest=8192, longest_prompt=longest_prompt)
    sizes = gpu(6000, {"batch_size": batch_size}, work=work)
    assert (sizes.prefill_chunk, sizes.prefill_shapes) == (512, shapes)
    of_several = ((4, 512),) if batch_size > 1 else ()
    asked = {"batch_size": batch_size, "max_len": 8192}
    assert gpu(6000, asked).prefill_shapes == (*of_several, (1, 2048))


@pytest.mark.parametrize(
    ("asked", "work", "steps"),
    [
        ({}, None, 8),
        ({"max_prefill_streak": 0}, None, 8),  # as a server asks
        (SpeculativeConfig(method="eagle3", model="HEAD").engine_options(), None, 4),
        ({}, Workload(num_sequences=1, longest=228, longest_prompt=100), 8),
        ({}, Workload(num_sequences=1, longest=227, longest_prompt=100), 1),  # most is for nothing
        ({"decode_steps": 1}, None, 1),
        ({"decode_steps": 7, "mode": "dvr"}, None, 7),
        ({"mode": "dvr"}, None, 1),
        (SpeculativeConfig(method="ngram").engine_options(), None, 1),
    ],
)
def test_a_small_model_on_a_gpu_has_several_steps_a_launch(gpu, asked, work, steps):
    assert gpu(6000, asked, work=work).decode_steps == steps


def test_a_large_model_and_a_cpu_have_one_step_a_launch(gpu, toy, monkeypatch):
    sizes = sizing.choose_sizes(toy.model, {}, gpu_memory_utilization=0.9)
    assert sizes.decode_steps == 1
    monkeypatch.setattr(launch_times, "_BYTES_PER_US", 1.0)  # of a memory that is slow
    assert gpu(6000, {}).decode_steps == 1


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3", "qwen3_5", "mistral_window"])
def test_only_dense_models_with_full_attention_have_the_larger_prefill(gpu, family):
    asked = {"batch_size": 8, "max_len": 8192}
    config = load_config(Path(__file__).parent / "golden" / "hf" / family)
    assert gpu(6000, asked, config=config).prefill_shapes == ((4, 512),)


def test_what_is_asked_for_wins_over_what_the_work_needs(gpu):
    work = Workload(num_sequences=1, longest=300, longest_prompt=300)
    asked = {"batch_size": 32, "prefill_chunk": 3, "max_len": 2048, "num_pages": 77}
    sizes = gpu(6000, asked, work=work)
    assert {name: getattr(sizes, name) for name in asked} == asked
    assert sizes.prefill_shapes == ()


def test_a_chunk_is_no_longer_than_a_prompt_needs(gpu):
    work = Workload(num_sequences=1, longest=300, longest_prompt=65)
    chunks = [gpu(6000, {"prefill_chunk": n}, work=work).prefill_chunk for n in (10**6, 64, 5)]
    assert chunks == [128, 64, 5]
    assert gpu(6000, {"prefill_chunk": 10**6}).prefill_chunk == 4096


def test_lengths_that_were_rounded_up_shrink_to_the_cache_and_the_work_does_not(gpu):
    work = Workload(num_sequences=9, longest=600, longest_prompt=65)
    assert gpu(8, {}, work=work).max_len == 1024
    assert gpu(6, {}, work=work).max_len == 768
    with pytest.raises(ValueError, match="max_len=600 takes 5 pages of 128 tokens"):
        gpu(4, {}, work=work)


def test_a_cpu_gives_one_long_sequence_room_beyond_its_usual_cache(toy, monkeypatch):
    a_page = memory.cache_bytes(toy.model, 1)
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", a_page)
    work = Workload(num_sequences=20, longest=200, longest_prompt=5)
    sizes = sizing.choose_sizes(toy.model, {}, gpu_memory_utilization=0.9, work=work)
    assert sizes.num_pages == 2
    with pytest.raises(ValueError, match="max_len=256 takes 2 pages"):
        sizing.choose_sizes(toy.model, {"max_len": 256}, gpu_memory_utilization=0.9)


@pytest.mark.quick_cases("2-8")
@pytest.mark.parametrize(("num_prompts", "batch_size"), [(1, 1), (2, 8), (30, 8)])
def test_the_command_sizes_its_engine_by_its_prompts(
    folder, toy, monkeypatch, capsys, num_prompts, batch_size
):
    made: list[EngineConfig] = []

    class Noted(Engine):
        def __init__(self, model, config, **options):
            made.append(config)
            super().__init__(model, config, **options)

    monkeypatch.setattr(llm, "Engine", Noted)
    prompts = [part for i in range(num_prompts) for part in ("--prompt", f"a{i}")]
    options = ["--model", str(folder), "--cache-dir", "none", "--max-tokens", "4"]
    assert generate.main([*options, *prompts]) == 0
    (config,) = made
    work = Workload(num_sequences=num_prompts, longest=8, longest_prompt=4)
    assert config == sizing.choose_sizes(toy.model, {}, gpu_memory_utilization=0.9, work=work)
    assert (config.batch_size, config.num_pages) == (batch_size, 2 * batch_size)
    err = capsys.readouterr().err
    assert f"{batch_size} at once, prompts in chunks of 64 tokens, room for 256" in err
    assert f"{2 * batch_size} pages" in err


@pytest.mark.slow
def test_a_check_frees_the_cache_of_a_run_before_the_next(folder, monkeypatch):
    """Two caches of the size that a GPU has room for would not fit."""
    alive: list[weakref.ref] = []

    class Noted(Engine):
        def __init__(self, model, config, **options):
            gc.collect()
            assert [one for ref in alive if (one := ref()) is not None] == []
            super().__init__(model, config, **options)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(llm, "Engine", Noted)
    options = ["--model", str(folder), "--cache-dir", "none", "--max-tokens", "2", "--quiet"]
    assert generate.main([*options, "--prompt", "a", "--check", "--repeat", "3"]) == 0
    assert len(alive) == 3


def test_the_bundled_model_has_a_name_and_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    assert hub.find_model("novels-6m") == hub.find_model("bundled") == bundled_model_path()
    with pytest.raises(ValueError, match="revision='main' has no meaning for the bundled model"):
        hub.find_model("bundled", revision="main")
    monkeypatch.chdir(tmp_path)
    Path("novels-6m").mkdir()
    assert hub.find_model("novels-6m") == Path("novels-6m")


def test_a_folder_without_a_model_is_called_that(tmp_path):
    """Not a folder with another kind of tokenizer."""
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
        detjax.LLM(tmp_path)


def test_token_ids_may_be_arrays(toy):
    ids = [0, 5, 6]
    few = detjax.SamplingParams(max_tokens=2, temperature=0)
    expected = [one.prompt_token_ids for one in toy.generate([ids, ids], few)]
    for prompts in (
        [np.array(ids)] * 2,
        [jnp.array(ids)] * 2,
        np.array([ids] * 2),
        jnp.array([ids] * 2),
    ):
        assert [one.prompt_token_ids for one in toy.generate(prompts, few)] == expected
    [alone] = toy.generate(jnp.array(ids), few)
    assert alone.prompt_token_ids == expected[0]


def test_the_reason_of_an_end_is_a_text(toy):
    """As vLLM has it: it compares with a text, and JSON takes it."""
    [found] = toy.generate(["a"], detjax.SamplingParams(max_tokens=2, ignore_eos=True))
    reason = found.outputs[0].finish_reason
    assert reason == "length" and f"{reason}" == "length" and json.dumps(reason) == '"length"'


def test_the_command_refuses_a_share_of_a_gpu_that_is_not_there(folder, capsys):
    options = ["--model", str(folder), "--prompt", "a", "--cache-dir", "none"]
    assert generate.main([*options, "--gpu-memory-utilization", "0.5"]) == 2
    assert "and this runs on the CPU; leave it out" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"batchsize": 3}, TypeError, "no option 'batchsize'; did you mean batch_size?"),
        ({"verify_windows": 3}, TypeError, "did you mean verify_window?"),
        ({"seed": 3}, TypeError, "seed is no option of LLM: it is a field of SamplingParams"),
        ({"gpu_memory_utilization": 1.5}, ValueError, "must be above 0 and at most 1"),
        (
            {"dtype": "float32", "profile": detjax.NumericsProfile()},
            ValueError,
            "dtype='float32' does not go with a profile",
        ),
        ({"backend": "cuda"}, ValueError, "backend='cuda' must be 'auto' or one of"),
        ({"tp": 3}, ValueError, "tp=3"),
        ({"tp": "2"}, ValueError, "tp='2' must be an integer, not str"),
        ({"dp": 0}, ValueError, "dp=0 must be at least 1"),
        ({"dtype": np.float32}, ValueError, "dtype=.* must be a text, such as 'bfloat16'"),
        ({"max_len": "abc"}, ValueError, "max_len='abc' must be an integer, not str"),
        ({"prefill_chunk": 2.5}, ValueError, "prefill_chunk=2.5 must be an integer"),
        ({"decode_batches": 3}, ValueError, "decode_batches=3 must be a tuple of integers"),
        ({"decode_batches": {4}}, ValueError, r"decode_batches=.4. must be a tuple of integers"),
        ({"decode_lens": (64, "8")}, ValueError, r"decode_lens\[1\]='8' must be an integer"),
        ({"prefill_shapes": 1}, ValueError, "prefill_shapes=1 must be a tuple of pairs of integ"),
        ({"prefill_shapes": (1, 2)}, ValueError, r"prefill_shapes\[0\]=1 must be a tuple of integ"),
        ({"has_prefix_cache": "off"}, ValueError, "has_prefix_cache='off' must be True or False"),
        ({"max_draft_fraction": "a"}, ValueError, "max_draft_fraction='a' must be a number"),
        ({"enable_lora": "no"}, ValueError, "enable_lora='no' must be True or False"),
        ({"gpu_memory_utilization": "a"}, ValueError, "must be a number, not str"),
        ({"tensor_parallel_size": 2}, TypeError, "did you mean tp\\?"),
        ({"mode": "quick"}, ValueError, "mode='quick' must be one of"),
        ({"max_len": CONTEXT + 1}, ValueError, "longer than the model's context of 256"),
        ({"max_len": 10**6, "num_pages": 1}, ValueError, "longer than the model's context of 256"),
        ({"batch_size": 3, "dp": 2}, ValueError, "batch_size=3 must be a multiple of dp=2"),
    ],
)
def test_an_option_that_cannot_be_is_named(folder, options, error, says):
    with pytest.raises(error, match=says):
        detjax.LLM(folder, **options)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (["a", ""], "prompt 1 has no tokens"),
        (
            ["a", "x" * CONTEXT],
            "prompt 1 has 256 tokens and its answer 1, more than",
        ),
        ([[1, 300]], "prompt 0 has token id 300, outside the vocabulary"),
        ([[1, -1]], "prompt 0 has token id -1"),
        ([[1, 0.5]], "prompt 0 is neither a text nor token ids"),
        ([None], "prompt 0 is neither a text nor token ids"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(toy, untyped, prompts, says):
    with pytest.raises(ValueError, match=says):
        toy.generate(prompts)


def test_sampling_parameters_must_be_one_or_as_many_as_prompts(toy):
    with pytest.raises(ValueError, match="there are 2 prompts and 1 SamplingParams"):
        toy.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize("stop", [("",), (1,), 5])
def test_stop_strings_are_texts(untyped, stop):
    with pytest.raises(ValueError, match="^stop="):
        detjax.SamplingParams(stop=stop)


def test_one_stop_string_is_a_tuple_of_one(untyped):
    assert detjax.SamplingParams(stop="ab").stop == ("ab",)
    assert detjax.SamplingParams(stop=["a", "b"]).stop == ("a", "b")


# ---------------------------------------------------------------------------------------- examples

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(folder, untyped, monkeypatch, capsys) -> Callable[..., str]:
    """Run an example in this process with the toy model; return what it printed."""

    def run(name: str, *argv: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, str(folder), *argv])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_example_offline_batch_writes_a_line_of_json_each(example, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    lines = [json.loads(line) for line in example(
        "offline_batch.py", str(tmp_path / "prompts.txt")
    ).splitlines()]  # fmt: skip
    assert [line["prompt"] for line in lines] == ["one", "two"]
    assert all(len(line["logprobs"]) == len(line["top_logprobs"]) > 0 for line in lines)


@pytest.mark.slow
def test_example_chat_holds_two_turns(example):
    out = example("chat.py")
    assert out.count("user: ") == 2 and out.count("digest: ") == 2


@pytest.mark.slow
def test_example_reproduce_completion_finds_the_same_bits_or_says_so(example, tmp_path):
    record = tmp_path / "record.json"
    for _ in range(2):  # makes the record, then reads it
        with pytest.raises(SystemExit) as end:
            example("reproduce_completion.py", str(record))
        assert end.value.code == 0
    record.write_text(record.read_text().replace('"digest": "', '"digest": "0'))
    with pytest.raises(SystemExit) as end:
        example("reproduce_completion.py", str(record))
    assert end.value.code == 3


@pytest.mark.slow
def test_example_async_streaming_cancels_one(example):
    out = example("async_streaming.py")
    assert "whole: " in out and "cancelled: " in out and out.endswith("1 cancelled\n")


@pytest.mark.slow
def test_example_rl_rollout_agrees_to_the_bit(example):
    assert example("rl_rollout.py").count("every bit equal") == 2


@pytest.mark.slow
def test_example_stream_weights_has_the_bits_of_a_folder(example):
    out = example("stream_weights.py")
    digests = {line.split()[-1] for line in out.splitlines() if line.startswith("weights ")}
    assert len(digests) == 3, "the weights make no difference"
    assert out.endswith("every bit equal\n")


def test_programs_are_kept_where_the_user_says(folder, tmp_path, monkeypatch):
    """JAX's own folder goes first, and None changes nothing."""
    kept: list[str] = []
    monkeypatch.setattr(llm, "keep_programs_of_build", lambda folder: kept.append(str(folder)))
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", "/of jax")
        for cache_dir in ("auto", None, tmp_path):
            llm._keep_programs(cache_dir)
        assert kept == [str(tmp_path)]
        jax.config.update("jax_compilation_cache_dir", None)
        llm._keep_programs(None)
        detjax.LLM(folder)
        assert kept == [str(tmp_path), "/caches/detjax"]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_cache_folder_that_cannot_be_written_is_a_warning(folder, tmp_path):
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    with pytest.warns(UserWarning, match="cannot be written .* compiled programs are not kept"):
        detjax.LLM(folder, cache_dir=tmp_path / "file" / "cache")
    assert jax.config.jax_compilation_cache_dir == before


_STARTS = """
import sys
import detjax

llm = detjax.LLM(sys.argv[1], show_progress=False)
print(llm.generate("a", detjax.SamplingParams(max_tokens=4))[0].outputs[0].digest())
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(folder, tmp_path):
    """By what it writes; the control has a folder of its own."""

    def start(cache: str) -> tuple[str, set[str]]:
        unset = {"JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"}
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        run = subprocess.run(
            [sys.executable, "-c", _STARTS, str(folder)],
            env=kept | {"XDG_CACHE_HOME": str(tmp_path / cache), "JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        files = {path.name for path in (tmp_path / cache).rglob("*-cache")}
        return run.stdout, files

    first, again, control = start("a"), start("a"), start("b")
    assert first[1] and first == again
    assert control == first and (tmp_path / "b").is_dir()


def test_a_dropped_model_frees_weights_and_cache_at_once(folder):
    """Else the next model of a notebook finds the GPU full until Python looks for cycles."""
    made = detjax.LLM(folder)
    made.generate("a", GREEDY)
    arrays = [made.model.params["embed"], made.engine._runner._device._arrays[0]]
    there = [weakref.ref(array) for array in arrays]
    del arrays
    gc.collect()
    gc.disable()
    try:
        del made
        assert [array() for array in there] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda llm: llm.generate(None), "prompts is None; give a text, token ids, or a list"),
        (lambda llm: llm.generate({"prompt": "hi"}), "prompts is {'prompt': 'hi'}; give a text"),
        (lambda llm: llm.generate(["a", {"prompt": "hi"}]), "prompt 1 is neither a text nor"),
        (lambda llm: llm.generate([{5: 6}]), "prompt 0 is neither .*={5: 6} must be a sequence"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "sampling has {'max_tokens': 3}; give"),
        (lambda llm: llm.generate(["a"], [{"n": 3}]), "sampling has {'n': 3}; give Sampling"),
        (lambda llm: llm.generate(["a"], lora_request="/x"), "lora_request has '/x'; give LoRAReq"),
        (lambda llm: llm.generate(["a"], lora_request=["/x"]), "lora_request has '/x'; give LoRA"),
        (lambda llm: llm.generate("a\ud800"), "character 2 of the text is half of a surrogate"),
        (lambda llm: llm.chat("hi"), "messages is 'hi'; give a list"),
        (lambda llm: llm.chat({"role": "user", "content": "a"}), "; give a list"),
        (lambda llm: llm.chat([["hi"]]), r"messages.0. is 'hi'; give {.role"),
        (lambda llm: llm.chat([{"role": "user", "content": "\ud800"}]), "half of a surrogate"),
    ],
)
def test_what_is_no_prompt_is_named(toy, untyped, ask, says):
    with pytest.raises(ValueError, match=says):
        ask(toy)


def test_a_receipt_of_what_is_no_answer_says_where_the_answers_are(toy, untyped):
    (out,) = toy.generate("one", GREEDY)
    with pytest.raises(TypeError, match="not PromptOutput; .*as outputs.0.$"):
        toy.receipt(out)
