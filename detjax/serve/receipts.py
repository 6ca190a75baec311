# SPDX-License-Identifier: Apache-2.0
"""Receipts of answers over HTTP: each the line that `detjax.replay` and `detjax.audit` read."""

from detjax.proof.canonical_json import canonical_json
from detjax.proof.receipt import Receipt
from detjax.serve.protocol import RefusedError
from detjax.serve.service import ServedModel
from detjax.serving.request import Completion, SamplingParams
from detjax.serving.text import CompletionOutput, TextStream


def check_receipt(model: ServedModel, *, is_deterministic: bool, max_tokens: int) -> None:
    """Refuse a receipt that could not be made, before there is an answer.

    Raises:
        RefusedError: With the reason.
    """
    why = ""
    if not is_deterministic:
        why = "the answer would not be canonical, and nobody could check it"
    elif not max_tokens:
        why = "max_tokens=0 makes no token to give a receipt of"
    elif model.identity.model["weights"] is None:
        why = "the weights lie in several processes, and none can hash them all"
    try:
        canonical_json({})
    except ImportError as error:
        why = str(error)
    if why:
        raise RefusedError(f"receipt=true: {why}", field="receipt")


def receipt_line(model: ServedModel, done: Completion, sampling: SamplingParams) -> str:
    """The receipt of an answer that has ended, canonical JSON, signed if the server has a key."""
    stream = TextStream.of(
        sampling,
        model.tokenizer,
        prompt_ids=done.prompt_token_ids,
        eos_ids=model.end_token_ids,
    )
    pieces = [stream.push(token_id).text for token_id in done.token_ids]
    output = CompletionOutput(
        completion=done,
        text="".join([*pieces, stream.finish()]),
        fingerprint=model.fingerprint,
        sampling=sampling,
        is_deterministic=True,
    )
    receipt = Receipt.of(model.identity, output, end_token_ids=model.end_token_ids)
    key = model.signing_key
    return (receipt if key is None else receipt.signed(key)).to_json()
