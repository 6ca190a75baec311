# SPDX-License-Identifier: Apache-2.0
"""A request's ranges are checked by name, and a digest covers ids and logprob bits alone."""

import dataclasses
import hashlib
import re
import struct

import jaxtyping
import numpy as np
import pytest

from detjax.engine.outputs.completion import Completion
from detjax.engine.outputs.request_output import FinishReason
from detjax.engine.requests.request import Request
from detjax.engine.requests.sampling_params import MAX_TEMPERATURE, MIN_TEMPERATURE, SamplingParams


@pytest.fixture
def untyped():
    """As in a user's program, where nobody checks annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def completion(**changes) -> Completion:
    """A finished sequence of two tokens."""
    base = Completion(
        request_idx=0,
        sequence_idx=0,
        prompt_token_ids=(1,),
        token_ids=(5, 2),
        logprobs=(np.float32(-0.5), np.float32(-1.25)),
        top_logprobs=((), ()),
        finish_reason=FinishReason.STOP,
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("seed", -1),
        ("seed", 2**64),
        ("n", 0),
        ("logprobs", -1),
        ("logprobs", 65),
        ("temperature", 1.5e30),
        ("temperature", 8.6e37),
        ("temperature", 9e-31),
        ("n", 1025),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match="^" + re.escape(f"{name}={value} must be")):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 1.0), ("min_p", 0.0), ("seed", 2**64 - 1), ("temperature", 0.0), ("top_k", 0)],
)
def test_the_ends_of_a_range_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_a_temperature_and_its_reciprocal_are_normal_float32(temperature):
    """A logit of 1e8 stays finite, and minus infinity what it is."""
    kept = np.float32(SamplingParams(temperature=temperature).temperature)
    for factor in (np.float32(1) / kept, kept):
        assert np.finfo(np.float32).tiny < factor < np.finfo(np.float32).max
        assert np.isfinite(np.float32(1e8) * factor) and np.float32(-np.inf) * factor == -np.inf


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seed", 1.5, "seed=1.5 must be an integer, not float"),
        ("seed", np.float32(2), "must be an integer, not float32"),
        ("seed", True, "seed=True must be an integer, not bool"),
        ("n", 2.0, "n=2.0 must be an integer, not float"),
        ("max_tokens", "9", "max_tokens='9' must be an integer, not str"),
        ("logprobs", 2.5, "logprobs=2.5 must be an integer, not float"),
        ("top_k", None, "top_k=None must be an integer, not NoneType"),
        ("temperature", "hot", "temperature='hot' must be a number, not str"),
        ("top_p", None, "top_p=None must be a number"),
        ("min_p", 1j, "min_p=1j must be a number, not complex"),
        ("stop_token_ids", None, "stop_token_ids=None must be a sequence of integers"),
        ("stop_token_ids", "12", "stop_token_ids='12' must be a sequence of integers"),
        ("stop_token_ids", (1, 2.5), r"stop_token_ids\[1\]=2.5 must be an integer, not float"),
        ("stop_token_ids", 7, "stop_token_ids=7 must be a sequence of integers"),
    ],
)
def test_a_value_of_another_type_is_named_when_it_is_given(untyped, name, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_are_taken_for_those_of_python(untyped):
    of_numpy = SamplingParams(
        max_tokens=np.int64(5), temperature=np.float32(0.5), top_k=np.uint8(3),
        top_p=np.float64(0.5), min_p=np.int32(0), seed=np.uint64(2**64 - 1), n=np.int16(2),
        logprobs=np.int32(1), stop_token_ids=np.array([4, 5], np.int32),
    )  # fmt: skip
    plain = SamplingParams(
        max_tokens=5, temperature=0.5, top_k=3, top_p=0.5, min_p=0.0, seed=2**64 - 1, n=2,
        logprobs=1, stop_token_ids=(4, 5),
    )  # fmt: skip
    assert of_numpy == plain and repr(of_numpy) == repr(plain)
    asked = Request(
        prompt_token_ids=np.arange(3, dtype=np.uint16), sampling=plain, priority=np.int8(2)
    )
    assert repr(asked) == repr(Request(prompt_token_ids=(0, 1, 2), sampling=plain, priority=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": (1, 2.0)}, r"prompt_token_ids\[1\]=2.0 must be an integer"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids='text' must be a sequence of integers"),
        ({"priority": 10**9}, r"priority=1000000000 must be in \[-100, 100\]"),
        ({"priority": 0.5}, "priority=0.5 must be an integer"),
        ({"sampling": None}, "sampling=None must be a SamplingParams"),
        ({"is_deterministic": 1}, "is_deterministic=1 must be a bool"),
        ({"cache_salt": 3}, "cache_salt=3 must be a str"),
    ],
)
def test_a_bad_request_is_named_when_it_is_made(untyped, changes, message):
    with pytest.raises(ValueError, match=message):
        Request(**({"prompt_token_ids": (1,), "sampling": SamplingParams()} | changes))


def test_requests_with_the_same_content_are_equal_and_hash_alike():
    one, other = (Request(prompt_token_ids=(1, 2), sampling=SamplingParams()) for _ in range(2))
    assert one == other and hash(one) == hash(other)


def test_a_digest_is_sha256_of_little_endian_ids_and_logprobs():
    expected = hashlib.sha256(struct.pack("<2i2f", 5, 2, -0.5, -1.25)).hexdigest()
    assert completion().digest() == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (5, 3)},
        {"logprobs": (np.float32(-0.5), np.nextafter(np.float32(-1.25), np.float32(0)))},
        {"logprobs": (np.float32(-0.5), np.float32(0.0))},
    ],
)
def test_one_bit_changes_a_digest(changes):
    assert completion(**changes).digest() != completion().digest()


def test_the_sign_of_zero_changes_a_digest():
    zeros = [completion(logprobs=(np.float32(0), np.float32(z))) for z in (0.0, -0.0)]
    assert zeros[0].digest() != zeros[1].digest()


@pytest.mark.parametrize(
    "changes",
    [{"request_idx": 3}, {"sequence_idx": 1}, {"finish_reason": FinishReason.LENGTH}],
)
def test_a_digest_does_not_depend_on_where_a_request_stood(changes):
    assert completion(**changes).digest() == completion().digest()


def test_a_logprob_written_as_a_python_float_is_read_back_bit_for_bit():
    values = np.array([-0.1, -1e-7, -123.456, -0.0, np.float32(1e-45)], np.float32)
    back = np.array([float(repr(float(value))) for value in values], np.float32)
    assert back.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("stop", ["x"] * 65, "has 65 texts, more than 64"),
        ("stop", "x" * 1025, "1025 in the longest text, more than 8192 or 1024"),
        ("bad_words", [f"w{i}" for i in range(1025)], "has 1025 texts, more than 1024"),
        ("bad_words", ["abcd" * 250] * 9, "has 9000 characters"),
        ("stop_token_ids", range(1025), "has 1025 tokens, more than 1024"),
        ("stop_token_ids", (5, 2**63), "9223372036854775808 must be at most"),
        ("top_k", 2**53, "9007199254740992 must be at most"),
        ("truncate_prompt_tokens", 2**53, "9007199254740992 must be at most"),
        ("allowed_token_ids", range(2**20 + 1), "has 1048577 tokens, more than 1048576"),
        ("logit_bias", {i: 1.0 for i in range(1025)}, "1025 entries are more than 1024"),
    ],
)
def test_texts_and_lists_have_bounds_that_are_named(untyped, name, value, says):
    with pytest.raises(ValueError, match=f"{name}=.*{says}"):
        SamplingParams(**{name: value})
