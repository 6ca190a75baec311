# SPDX-License-Identifier: Apache-2.0
"""A published model against transformers: weights, tokens, chats, logits, logprobs, an answer.

transformers reads the GGUF file itself, so the conversion is compared as well.
"""

import contextlib
import hashlib
from functools import cache

import numpy as np
import pytest

from detjax.engine.config import EngineConfig
from detjax.engine.engine import Engine
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.running.device_arrays import empty_pages
from detjax.models.tokenizer import Tokenizer
from detjax.models.weights.files import open_tensors
from detjax.testing.dummies import batch_of, scoring_step

from ..real_model import example, goldens, real_folder, real_model

GOLDEN = goldens()
TEXTS = list(GOLDEN["texts"].values())
DISTANCES = {"float32": 4, "bfloat16": 2}
"""Allowed distance from float64, over that of transformers in the same dtype.

Both programs round the same function in the same dtype, so their errors are draws of one size. The
largest of some hundred may differ between two draws by a factor below 2 (bfloat16, where detjax
rounds less often) or 4 (float32, where sums are long and only their order differs).
"""


def allowed(dtype: str, what: str) -> float:
    """The tolerance of logits or logprobs; a wrong rotation moves them further."""
    errors = GOLDEN["max_abs_minus_float64"]
    tolerance = DISTANCES[dtype] * errors[f"{dtype}_{what}"]
    assert tolerance < errors[f"control_{what}"]
    return tolerance


@cache
def engine(dtype: str) -> Engine:
    return Engine(real_model(dtype), EngineConfig(batch_size=4, prefill_chunk=64, max_len=256))


def test_the_goldens_are_of_the_file_that_the_example_fetches():
    assert GOLDEN["gguf_sha256"] == example.SHA256


@pytest.mark.slow
@pytest.mark.golden
def test_weights_are_those_that_transformers_reads_from_the_same_file():
    total = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        stored = open_tensors(real_folder(), stack)
        for name in sorted(stored):
            total.update(name.encode())
            total.update(np.array(stored[name].rows).tobytes())
    assert len(stored) == GOLDEN["num_tensors"] == 272
    assert total.hexdigest() == GOLDEN["weights_sha256"]


@pytest.mark.slow
@pytest.mark.golden
def test_texts_and_chats_have_the_tokens_of_transformers():
    tokenizer = Tokenizer.from_folder(real_folder())
    for text in TEXTS:
        if text["text"]:
            assert list(tokenizer.encode(text["text"])) == text["ids"]
    for chat in GOLDEN["chats"].values():
        assert tokenizer.render_chat(chat["messages"]) == chat["text"]
        assert list(tokenizer.apply_chat_template(chat["messages"])) == chat["ids"]


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("dtype", DISTANCES)
def test_logits_are_as_close_to_float64_as_those_of_transformers(dtype):
    model, tolerance = real_model(dtype), allowed(dtype, "logits")
    rows = [(text["ids"], 0) for text in TEXTS]
    table = np.arange(2 * len(rows), dtype=np.int32).reshape(len(rows), 2)
    _, logits = scoring_step(model)(empty_pages(model, table.size), batch_of(rows, table))
    for row, text in enumerate(TEXTS):
        at = np.asarray(logits[row, np.array(text["positions"])], np.float64)
        got = np.take_along_axis(at, np.array(text["top_ids"]), axis=1)
        error = np.abs(got - np.array(text["top_logits_float64"])).max()
        assert error <= tolerance, f"text {row}: {error:.3g} from float64, not {tolerance:.3g}"


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("dtype", DISTANCES)
def test_logprobs_are_as_close_to_float64_as_those_of_transformers(dtype):
    tolerance = allowed(dtype, "logprobs")
    scored = engine(dtype).score([text["ids"] for text in TEXTS])
    for row, (text, tokens) in enumerate(zip(TEXTS, scored, strict=True)):
        got = np.array([token.logprob for token in tokens], np.float64)
        error = np.abs(got - np.array(text["logprobs_float64"])).max()
        assert error <= tolerance, f"text {row}: {error:.3g} from float64, not {tolerance:.3g}"


@pytest.mark.slow
@pytest.mark.golden
def test_two_hundred_greedy_tokens_are_those_of_transformers():
    """At each the best two logits are further apart than both errors can bring them."""
    assert GOLDEN["min_greedy_margin_float64"] > 2 * allowed("float32", "logits")
    prompt, answer = GOLDEN["chats"]["story"]["ids"], GOLDEN["greedy_ids"]
    request = Request(
        prompt_token_ids=tuple(prompt), sampling=SamplingParams(max_tokens=len(answer))
    )
    (got,) = engine("float32").generate([request])
    assert list(got.token_ids) == answer and len(answer) == 200
    assert Tokenizer.from_folder(real_folder()).decode(answer) == GOLDEN["greedy_text"]
