# SPDX-License-Identifier: Apache-2.0
"""Receipts of answers over HTTP: each the line that `detjax.replay` and `detjax.audit` read."""

from detjax.engine.outputs.completion import Completion, CompletionOutput
from detjax.engine.requests.sampling_params import SamplingParams
from detjax.proof.canonical_json import canonical_json
from detjax.proof.receipt import Receipt
from detjax.server.errors import RefusedError
from detjax.server.served_model import ServedModel


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
    elif model.engine.weight_version != model.weight_version:
        why = _replaced(model, model.engine.weight_version)
    elif model.identity.model["weights"] is None:
        why = "the weights lie in several processes, and none can hash them all"
    try:
        canonical_json({})
    except ImportError as error:
        why = str(error)
    if why:
        raise RefusedError(f"receipt=true: {why}", field="receipt")


def weights_of(model: ServedModel, done: Completion) -> str | None:
    """The hash of the weights that made an answer; None if the server has not taken it."""
    is_known = done.weight_version == model.weight_version
    return model.identity.model["weights"] if is_known else None


def _replaced(model: ServedModel, version: int) -> str:
    return (
        f"weight_version={version} answers, and the server has the hash of "
        f"weight_version={model.weight_version} alone; POST /update_weights_from_disk, or start it "
        "with the new weights"
    )


def receipt_line(
    model: ServedModel, done: Completion, text: str, sampling: SamplingParams, adapter: str = ""
) -> str:
    """The receipt of an answer that has ended, canonical JSON, signed if the server has a key.

    Args:
        model: That has answered.
        done: The tokens of the answer.
        text: The text of the answer.
        sampling: As it was used.
        adapter: Hash of the adapter that answered; "" is the model alone.

    Raises:
        ValueError: If other weights made it than those that the server knows.
    """
    if done.weight_version != model.weight_version:
        raise ValueError(f"no receipt: {_replaced(model, done.weight_version)}")
    output = CompletionOutput(
        completion=done,
        text=text,
        fingerprint=model.fingerprint,
        sampling=sampling,
        is_deterministic=True,
        adapter=adapter,
    )
    receipt = Receipt.of(model.identity, output, end_token_ids=model.end_token_ids)
    key = model.signing_key
    return (receipt if key is None else receipt.signed(key)).to_json()
