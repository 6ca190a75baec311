# SPDX-License-Identifier: Apache-2.0
"""What other servers' tests ask over HTTP of batch invariance, asked here in our own words.

After vLLM's online batch-invariance test (one at a time against many at once, top logprobs
compared) and the modes of SGLang's deterministic test (single, prefix, radix cache). Each is asked
of a server in mode `invariant`, of which it is true, and of one in mode `fast`, which must fail it:
so the questions can tell a server that depends on its load.
"""

import base64
import concurrent.futures

import numpy as np
import pytest

import detjax
from detjax.models.bundled import bundled_model_path
from detjax.models.tokenizer import Tokenizer
from detjax.testing.bitwise import assert_bitwise_equal

from .conftest import make_service, served

pytestmark = [pytest.mark.slow, pytest.mark.invariance]

PREFIX_CHARS = (1, 511, 2048, 4097)
NUM_PROMPTS = 32
MAX_LEN = 768


def _story():
    """Long words of the bundled model's vocabulary, so that 4097 characters fit its context."""
    backend = Tokenizer.from_folder(bundled_model_path()).backend
    words = sorted({text for i in range(4096) if len(text := backend.decode([i]).strip()) >= 7})
    words = [word for word in words if word.isascii() and word.isalpha()]
    order = np.random.default_rng(0).permutation(len(words))
    return " ".join(words[i] for i in order)


STORY = _story()


@pytest.fixture(scope="module")
def invariant():
    yield from _server("invariant")


@pytest.fixture(scope="module")
def fast():
    yield from _server("fast")


def _server(mode):
    # WHY: decode steps of two batch sizes, so that company changes the shapes that run; float32, in
    # which no rounding of activations hides an order of sums.
    llm = detjax.LLM(
        mode=mode, dtype="float32", max_len=MAX_LEN, batch_size=8, decode_batches=(1,),
        max_waiting=256, show_progress=False,
    )  # fmt: skip
    with served(make_service(llm), llm) as running:
        yield running


def ask(running, prompts, **fields):
    """Token ids, logprob bytes and top logprobs of each choice."""
    body = {"model": "novels-6m", "prompt": prompts, "return_token_ids": True,
            "return_logprob_bytes": True, "logprobs": 5}  # fmt: skip
    with running.client() as client:
        response = client.post("/v1/completions", json=body | fields)
    assert response.status_code == 200, response.text
    return [_bits(choice) for choice in response.json()["choices"]]


def _bits(choice):
    logprobs = np.frombuffer(base64.b64decode(choice["detjax"]["logprobs_f32"]), "<f4")
    tops = (choice["logprobs"] or {}).get("top_logprobs") or []
    return {
        "token_ids": np.asarray(choice["token_ids"], np.int32),
        "logprobs": logprobs,
        # Of JSON's decimals, which name one float64 each; tokens of one text count once.
        "top": np.asarray([v for top in tops for _, v in sorted(top.items())], np.float64),
    }


def at_once(running, prompts, **fields):
    """Each prompt in a request of its own, all at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(running, prompt, **fields)[0], prompts))


def num_different(first, second):
    def same(one, other):
        return all(
            one[name].shape == other[name].shape and one[name].tobytes() == other[name].tobytes()
            for name in one
        )

    return sum(not same(one, other) for one, other in zip(first, second, strict=True))


def check(running, first, second, claim):
    """The claim holds in `invariant`; the control, `fast`, fails it."""
    if running.llm.config.engine.mode == "invariant":
        for one, other in zip(first, second, strict=True):
            for name, bits in one.items():
                assert_bitwise_equal(other[name], bits, claim=f"{name}: {claim}")
    else:
        assert num_different(first, second), f"the control kept the claim: {claim}"


@pytest.fixture(params=["invariant", pytest.param("fast", marks=pytest.mark.control)])
def running(request):
    return request.getfixturevalue(request.param)


def prompts_of(count):
    return [STORY[97 * i :][: 20 + (131 * i) % 900] for i in range(count)]


def test_one_at_a_time_has_the_bits_of_all_at_once(running):
    prompts = prompts_of(NUM_PROMPTS)
    fields = {"temperature": 0.6, "seed": 42, "max_tokens": 16}
    alone = [ask(running, prompt, **fields)[0] for prompt in prompts]
    assert len({one["logprobs"].tobytes() for one in alone}) > NUM_PROMPTS // 2
    assert all(len(one["top"]) >= 4 * len(one["token_ids"]) for one in alone)
    together = at_once(running, prompts, **fields)
    check(running, alone, together, "an answer alone has the bits of one among 32 requests")
    listed = ask(running, prompts, **fields)
    check(running, alone, listed, "an answer alone has the bits of one in a list of 32 prompts")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_single_one_prompt_has_one_answer_at_every_batch_size(running, temperature):
    fields = {"temperature": temperature, "max_tokens": 12, "seed": 3}
    prompt = "The lamp in the tower was lit again"
    (alone,) = ask(running, prompt, **fields)
    found = [one for n in (2, 3, 8, 20) for one in ask(running, [prompt] * n, **fields)]
    claim = f"one prompt has one answer at batches of 1 to 20, temperature {temperature}"
    check(running, [alone] * len(found), found, claim)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_prefix_prompts_of_every_shared_length_in_one_batch(running, temperature):
    llm = running.llm
    assert len(llm.tokenizer.encode(STORY[: max(PREFIX_CHARS)])) + 40 < MAX_LEN
    fields = {"temperature": temperature, "max_tokens": 8, "seed": 3}
    prompts = [STORY[:size] + tail for size in PREFIX_CHARS for tail in ("", " He said", " It was")]
    alone = [ask(running, prompt, cache_salt=f"alone {i}", **fields)[0]
             for i, prompt in enumerate(prompts)]  # fmt: skip
    order = np.random.default_rng(5).permutation(2 * len(prompts)) % len(prompts)
    mixed = at_once(running, [prompts[i] for i in order], cache_salt="mixed", **fields)
    claim = f"shared prefixes of {PREFIX_CHARS} characters change no bit, {temperature=}"
    check(running, [alone[i] for i in order], mixed, claim)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_prefix_cache_cold_hot_and_flushed(running, temperature):
    fields = {"temperature": temperature, "max_tokens": 8, "seed": 3}
    engine, prompt = running.llm.engine, STORY[:2048]
    flush(engine)
    (cold,) = ask(running, prompt, **fields)
    before = engine.stats().prefix_tokens
    (hot,) = ask(running, prompt, **fields)
    found = engine.stats().prefix_tokens - before
    if running.llm.config.engine.mode == "invariant":
        assert found >= 128
    (longer,) = ask(running, STORY[:4097], **fields)
    (salted,) = ask(running, prompt, cache_salt="another", **fields)
    flush(engine)
    before = engine.stats().prefix_tokens
    (flushed,) = ask(running, prompt, **fields)
    assert engine.stats().prefix_tokens == before
    company = [f"{STORY[:300]} {i}" for i in range(8)]
    hot_in_company = at_once(running, [prompt, *company], **fields)[0]
    claim = f"cold, hot, flushed, in another's salt and hot in company: one answer, {temperature=}"
    found = [hot, salted, flushed, hot_in_company]
    check(running, [cold] * len(found), found, claim)
    assert num_different([cold], [longer]) == 1


def flush(engine):
    """Forget every cached prefix. The server's thread may still check an answer again."""
    with engine._turn:
        assert not engine.has_work
        engine._rechecks.give_up()
        engine._scheduler.forget_pages()
