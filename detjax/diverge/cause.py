# SPDX-License-Identifier: Apache-2.0
"""Why a result differs although its inputs are equal, as far as values alone can tell."""

from collections.abc import Sequence

import numpy as np

from detjax.diverge.recorder import Tap
from detjax.diverge.recording import CACHED, Recording, Step, digest
from detjax.models.loading import LoadedModel

OPERATIONS = {
    "ids": "the token that is run: of the prompt, chosen before, or a draft",
    "positions": "the position of the token",
    "cos": "a row of the rotary table",
    "sin": "a row of the rotary table",
    "embed": "the lookup of the embedding, gathered over ranks",
    "attn_norm": "the norm before attention",
    "q": "the product that gives queries, and the norm before it where that is fused",
    "k": "the product that gives keys, and the norm before it where that is fused",
    "v": "the product that gives values, and the norm before it where that is fused",
    "cached_k": "the key in the cache after the step: normalised, rotated and written",
    "cached_v": "the value in the cache after the step: written",
    "linear_q": "the product that gives queries of linear attention",
    "linear_k": "the product that gives keys of linear attention",
    "linear_v": "the product that gives values of linear attention",
    "linear_z": "the product that gives gates of linear attention",
    "linear_b": "the product that gives steps of linear attention",
    "linear_a": "the product that gives decays of linear attention",
    "attn_gate": "the product that gives gates of attention",
    "attention": "attention over the cache, and the rotation of queries; of linear attention the "
    "convolution, the recurrence and the norm behind it",
    "o_partial": "a rank's term of the product o",
    "o_sum": "the sum of the ranks' terms of the product o",
    "o_residual": "the product o, its sum over ranks, and the residual stream",
    "mlp_norm": "the norm before the feed-forward layer",
    "gated": "the product of gates and ups, gated, and the norm before it where that is fused",
    "router_logits": "the product of a router",
    "expert_ids": "the choice of experts: the greatest logits or sigmoids, equal ones by id",
    "shared_gate": "the product that gives the gate of a shared expert",
    "shared_expert": "the products of a shared expert, and its gate",
    "expert_weights": "the softmax or sigmoids of experts, and the sum of those that are chosen",
    "experts": "the experts' products, gated, from the ranks that have them",
    "down_partial": "a rank's term of the product down",
    "down_sum": "the sum of the ranks' terms of the product down",
    "down_residual": "the product down and its sum over ranks, or the sum of a row's experts, and "
    "the residual stream",
    "final_norm": "the last norm",
    "logits": "the product lm_head",
    "noise_key_0": "the key of the noise, of seed, prompt, sequence and position",
    "noise_key_1": "the key of the noise, of seed, prompt, sequence and position",
    "kept_tokens": "the tokens that top-k, top-p and min-p keep",
    "token_id": "the choice of the token: noise, temperature and the first maximum",
    "log_sum_exp": "the sum of the log-softmax",
    "logprob": "the log-probability of the chosen token",
}
"""What gives the result of each tap."""

Found = tuple[Recording, Step, LoadedModel]


def why_ids_differ(sides: Sequence[Found], answered: Sequence[int | None]) -> str:
    """Say which answer has another token here than the one that ran: an unaccepted draft.

    Args:
        sides: A and B at one position.
        answered: The token that each answer has at that position; None before and after it.
    """
    found = []
    for name, (_, step, _), token_id in zip("ab", sides, answered, strict=True):
        ran = int(step.values[Tap(None, "ids")][0])
        if token_id not in (None, ran):
            found.append(f"{name} ran {ran} and answered {token_id}: what follows was not for it")
    return "; ".join(found)


def why_attention_differs(tap: Tap, sides: Sequence[Found]) -> str:
    """Say what differs in the cache that attention read, or that nothing does.

    Args:
        tap: That of attention.
        sides: A and B at one position.
    """
    assert tap.layer is not None
    _, _, model = sides[0]
    if model.config.is_linear(tap.layer):
        return "the token's row is equal: it is the recurrence, or a row or state before it"
    caches = [step.cache[:, tap.layer] for _, step, _ in sides]  # [n, 2, K, C]
    bits = [np.ascontiguousarray(cache).view(f"u{cache.dtype.itemsize}") for cache in caches]
    # What of the cache the step itself wrote was compared before it.
    is_different = (bits[0] != bits[1]).any(axis=(2, 3))[:-1]
    if not is_different.any():
        return "keys, values and their pages are equal: it is attention itself, or its queries"
    position, part = (int(i[0]) for i in np.nonzero(is_different))
    what = "value" if part else "key"
    changed = [
        f"{name} has page {step.pages[position // model.profile.attention_block]} there and no "
        f"longer finds what it wrote"
        for name, (recording, step, model) in zip("ab", sides, strict=True)
        if _has_changed(recording, position, Tap(tap.layer, CACHED[part]), step)
    ]
    count = int(is_different.any(axis=1).sum())
    return (
        f"it reads another {what} of position {position} from the cache (of {count} of "
        f"{len(is_different)} earlier positions): {'; '.join(changed) or 'both as written'}"
    )


def _has_changed(recording: Recording, position: int, tap: Tap, step: Step) -> bool:
    written = recording.digests.get(position, {}).get(tap)
    entry = step.cache[position, tap.layer, CACHED.index(tap.name)][None]
    return written is not None and written != digest(entry)


def why_cache_differs(values: Sequence[np.ndarray]) -> str:
    """Say whether a key or value was written at all."""
    empty = [name for name, value in zip("ab", values, strict=True) if not value.any()]
    return f"{' and '.join(empty)} wrote nothing: the cache holds zeros" if empty else ""


def why_sum_differs(tap: Tap, sides: Sequence[Found]) -> str:
    """Say which side's sum over ranks, or its addition to the residual stream, is wrong."""
    prefix = tap.name.partition("_")[0]
    found = []
    for name, (_, step, model) in zip("ab", sides, strict=True):
        values = step.values
        partial = values.get(Tap(tap.layer, f"{prefix}_partial"))
        if partial is None:
            continue
        total = _tree(partial)
        summed = values.get(Tap(tap.layer, f"{prefix}_sum"))
        if summed is not None and _differ(summed[0], total):
            found.append(f"{name} does not add the ranks' terms as a binary tree")
            continue
        if prefix == "o" and model.config.o_bias:
            continue
        before = values[_residual_before(tap, prefix)][0]
        want = (before.astype(np.float32) + total).astype(before.dtype)
        if _differ(values[Tap(tap.layer, f"{prefix}_residual")][0], want):
            found.append(f"{name} does not round the residual stream and the sum once, together")
    return "; ".join(found)


def _residual_before(tap: Tap, prefix: str) -> Tap:
    assert tap.layer is not None
    if prefix == "down":
        return Tap(tap.layer, "o_residual")
    return Tap(tap.layer - 1, "down_residual") if tap.layer else Tap(None, "embed")


def _tree(terms: np.ndarray) -> np.ndarray:
    """The sum over the first axis, ((t0 + t1) + (t2 + t3)) + ..., in float32."""
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() != other.tobytes()
