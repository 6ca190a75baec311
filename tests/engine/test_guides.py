# SPDX-License-Identifier: Apache-2.0
"""Forms beside other masks, choices of thousands of texts, and tokenizers larger than a model."""

import importlib
import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detjax.engine.requests.sampling_params import SamplingParams
from detjax.engine.sampling.grammars import Grammars
from detjax.engine.sampling.structured_output import StructuredOutput
from detjax.llm import LLM
from detjax.models.bundled import bundled_model_path
from detjax.models.tokenizer import Tokenizer
from detjax.testing import assert_bitwise_equal
from detjax.testing.cases import quick_and_slow

VOCAB, END = 4096, 1
TOKENIZER = Tokenizer.from_folder(bundled_model_path())


def grammars_of(vocab_size: int) -> Grammars:
    return Grammars(TOKENIZER.backend.to_str, vocab_size=vocab_size, eos_token_ids=(END,))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(VOCAB)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_len=256, batch_size=4, show_progress=False)  # the programs of the server


def ids_of(text: str) -> list[int]:
    return TOKENIZER.backend.encode(text, add_special_tokens=False).ids


def allowed(mask) -> set[int]:
    return {i for i in range(len(mask) * 32) if not mask[i // 32] >> (i % 32) & 1}


# ------------------------------------------------------------------------------------------ choices


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.text('ab né"\\你😀', min_size=1, max_size=7), min_size=1, max_size=20),
    data=st.data(),
)
def test_masks_of_a_choice_are_those_of_a_rule_with_alternatives(grammars, texts, data):
    library = importlib.import_module("llguidance")
    grammars.check(StructuredOutput.of_choices(["a"]))  # which reads the tokenizer
    quoted = " | ".join(json.dumps(text) for text in texts)
    matcher = library.LLMatcher(grammars._tokenizer, f"start: {quoted}", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    guide = grammars.guide(StructuredOutput.of_choices(texts))
    ids = ids_of(data.draw(st.sampled_from(texts)))
    for n in range(len(ids) + 1):
        found, expected = guide.banned(ids[:n]), ~_bits(matcher.compute_bitmask())[: VOCAB // 32]
        assert_bitwise_equal(found, expected, claim="a mask of a choice")
        if n < len(ids):
            assert matcher.consume_tokens([ids[n]])


def _bits(mask: bytes) -> np.ndarray:
    return np.frombuffer(mask, "<i4")


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
RANDOM = random.Random(0)
MANY = {
    "numbers": [str(RANDOM.randrange(10**8)) for _ in range(3000)],
    "pairs": ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)],
    "signs": [chr(0x4E00 + i) for i in range(12_000)],
    "ends alike": [chr(0x4E00 + i) + "xyz" * 20 for i in range(900)],
    "long": ["".join(RANDOM.choices(LETTERS, k=600)) for _ in range(100)],
    "ends alike, many": [chr(0x4E00 + i) + "xyz" * 7 for i in range(2400)],
    "begin alike": ["a" * i for i in range(1, 340)],
    "begin alike, long": ["a" * 500 + letter for letter in LETTERS],
}


@pytest.mark.quick_cases("numbers-4", "pairs-4", "signs-4", "ends alike-4", "begin alike-4")
@pytest.mark.parametrize("count", quick_and_slow([4], [20]))
@pytest.mark.parametrize("name", MANY)
def test_a_choice_of_thousands_of_texts_goes_to_the_end_of_each(grammars, name, count):
    guide_of, texts = grammars.guide, MANY[name]
    form = StructuredOutput.of_choices(texts)
    for text in random.Random(1).sample(texts, count):
        ids, guide = ids_of(text), guide_of(form)
        for n, token_id in enumerate(ids):
            assert token_id in allowed(guide.banned(ids[:n])), (text, n)
        assert END in allowed(guide.banned(ids))


# -------------------------------------------------------------- tokenizers larger than their model


@pytest.mark.parametrize("vocab_size", [VOCAB - 1, VOCAB - 45, VOCAB, VOCAB + 17])
def test_a_tokenizer_may_have_other_ids_than_the_model(vocab_size):
    found = grammars_of(vocab_size)
    for form in (
        StructuredOutput.of_choices(["yes", "no"]),
        StructuredOutput(kind="json_object"),
        StructuredOutput(kind="regex", spec="(.|\n)+"),
    ):
        mask = found.guide(form).banned(())
        assert len(mask) == -(-vocab_size // 32)
        assert 0 < len(allowed(mask)) and max(allowed(mask)) < vocab_size
        full = allowed(grammars_of(VOCAB).guide(form).banned(()))
        assert allowed(mask) == {i for i in full if i < vocab_size}


# ------------------------------------------------------------------------------- beside other masks

A, B, SPACE_YES = ids_of("a")[0], ids_of("b")[0], ids_of(" yes")
YES = StructuredOutput.of_choices([" yes", " no"])
ENDED = {
    "min_tokens": {"min_tokens": 12},
    "allowed_token_ids": {"allowed_token_ids": (*SPACE_YES, *ids_of(" no"))},
    "bad_words": {"bad_words_token_ids": ((END,),)},
    "bad_words after others": {
        "bad_words_token_ids": ((SPACE_YES[-1], END), (ids_of(" no")[-1], END))
    },
    "logit_bias": {"logit_bias": ((END, -100.0),), "min_tokens": 9},
    "stop_token_ids": {"stop_token_ids": (A,), "min_tokens": 9},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDED)
@pytest.mark.parametrize("temperature", quick_and_slow([1.0], [0.0]))
def test_a_form_that_is_complete_ends_whatever_the_masks_say(llm, name, temperature):
    sampling = SamplingParams(
        max_tokens=20, temperature=temperature, seed=1, structured_output=YES, **ENDED[name]
    )
    (answer,) = llm.generate("Is the sea blue?", sampling)[0].outputs
    assert answer.text in (" yes", " no") and answer.finish_reason.value == "stop"
    assert answer.token_ids[-1] == END
    assert llm.receipt(answer)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_a_form_with_masks_ends_or_fails_for_want_of_a_token_inside_it(grammars, data):
    """Any path of possible tokens; the masks are those that the fields mean."""
    spec = data.draw(st.sampled_from(["[ab]{2,5}", "a+b?", "(ab|ba){1,3}", "[a-c ]*"]))
    word = st.lists(st.sampled_from([A, B, END]), min_size=1, max_size=3).map(tuple)
    some = st.sampled_from([A, B, END, ids_of("c")[0], ids_of("ab")[0], ids_of(" ")[0]])
    sampling = SamplingParams(
        min_tokens=data.draw(st.integers(0, 6)), max_tokens=9,
        allowed_token_ids=tuple(data.draw(st.sets(some))),
        bad_words_token_ids=tuple(data.draw(st.lists(word, max_size=3))),
        structured_output=StructuredOutput(kind="regex", spec=spec),
    )  # fmt: skip
    assert sampling.structured_output is not None
    plain = grammars.guide(sampling.structured_output)
    guide, ids = grammars.masked(sampling, ends=(END,)), []
    for _ in range(9):
        of_form, found = allowed(plain.banned(ids)), allowed(guide.banned(ids))
        expected = {
            i for i in of_form
            if (not sampling.allowed_token_ids or i in sampling.allowed_token_ids)
            and not (i == END and len(ids) < sampling.min_tokens)
            and not any((*ids, i)[-len(w):] == w for w in sampling.bad_words_token_ids)
        }  # fmt: skip
        assert found == (expected or of_form & {END})
        if not found:
            assert END not in of_form  # it is not complete
            break
        ids.append(data.draw(st.sampled_from(sorted(found))))
        if ids[-1] == END:
            break


@pytest.mark.slow
def test_masks_beside_a_form_are_those_of_a_request_without_one(llm):
    """The host computes the one, a device program the other."""
    readable = tuple(i for i in range(2, VOCAB) if TOKENIZER.token_bytes(i).isascii())
    masks = SamplingParams(
        max_tokens=24, temperature=1.0, seed=4, min_tokens=10, logprobs=3,
        logprobs_mode="processed", allowed_token_ids=(*readable, END),
        bad_words_token_ids=((ids_of(" the")[0],), (ids_of(",")[0], ids_of(" and")[0])),
        logit_bias=((END, 8.0),), repetition_penalty=1.2,
    )  # fmt: skip
    form = StructuredOutput(kind="regex", spec=r"[\x00-\x7f]*")
    (guided,), (free,) = (
        llm.generate("The old house", one)[0].outputs
        for one in (masks.with_fields({"structured_output": form}), masks)
    )
    assert guided.digest() == free.digest() and len(free.token_ids) >= 10
    (unmasked,) = llm.generate("The old house", SamplingParams(max_tokens=24, seed=4))[0].outputs
    assert unmasked.digest() != free.digest()


ALL_BUT_A = tuple((i,) for i in range(VOCAB) if i != A)


@pytest.mark.parametrize(
    "masks",
    [{"allowed_token_ids": (A,)}, {"bad_words_token_ids": ALL_BUT_A}],
    ids=["allowed_token_ids", "bad_words"],
)
def test_masks_that_leave_a_form_no_token_are_refused_before_it_begins(llm, masks):
    sampling = SamplingParams(max_tokens=9, structured_output=YES, **masks)
    with pytest.raises(ValueError, match="leaves no token to begin with that allowed_token_ids"):
        llm.generate("Is the sea blue?", sampling)
