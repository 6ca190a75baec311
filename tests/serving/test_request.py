# SPDX-License-Identifier: Apache-2.0
"""A request's ranges are checked by name, and a digest covers ids and logprob bits alone."""

import dataclasses
import hashlib
import struct

import numpy as np
import pytest

from detjax.serving.request import Completion, FinishReason, Request, SamplingParams


def completion(**changes) -> Completion:
    """A finished sample of two tokens."""
    base = Completion(
        request_idx=0,
        sample_idx=0,
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
        ("num_top_logprobs", -1),
        ("num_top_logprobs", 65),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value} must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 1.0), ("min_p", 0.0), ("seed", 2**64 - 1), ("temperature", 0.0), ("top_k", 0)],
)
def test_the_ends_of_a_range_are_allowed(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


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
    [{"request_idx": 3}, {"sample_idx": 1}, {"finish_reason": FinishReason.LENGTH}],
)
def test_a_digest_does_not_depend_on_where_a_request_stood(changes):
    assert completion(**changes).digest() == completion().digest()


def test_a_logprob_written_as_a_python_float_is_read_back_bit_for_bit():
    values = np.array([-0.1, -1e-7, -123.456, -0.0, np.float32(1e-45)], np.float32)
    back = np.array([float(repr(float(value))) for value in values], np.float32)
    assert back.tobytes() == values.tobytes()
