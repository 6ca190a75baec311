# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over the paged cache: prefill, decode and verify in one."""

from detjax.array_types import Activation, Array, Float32, Int32
from detjax.pallas_kernels.backend import Backend
from detjax.pallas_kernels.delta_rule.operands import Filters, OutputNorm, ProjectedRows
from detjax.pallas_kernels.delta_rule.sizes import states_of_page
from detjax.pallas_kernels.kernel_table import KERNELS


def delta_rule(
    rows: Activation[Array, "M K X"] | ProjectedRows,
    filters: Activation[Array, "K Y O"] | Filters,
    gates: tuple[Float32[Array, "K G"], Float32[Array, "K G"]],
    row_pages: Activation[Array, "L N 1 K P X"],
    state_pages: Float32[Array, "L N Z H I C"],
    page_table: Int32[Array, "B n"],
    positions: Int32[Array, "B T"],
    *,
    layer: int,
    backend: Backend,
    norm: OutputNorm | None = None,
) -> tuple[
    Float32[Array, "M H C"] | Activation[Array, "M O"],
    Activation[Array, "L N 1 K P X"],
    Float32[Array, "L N Z H I C"],
]:
    """Put new tokens' rows in their pages, and read each from the state that they lead to.

    With x the numbers of a head of keys that the convolution takes (q, k, then the values of the G
    heads that share them), b and a a number for each of these heads, c channels of a key, W = 4:

    `y[t] = round(silu(f[0] x[t - 3] + f[1] x[t - 2] + f[2] x[t - 1] + f[3] x[t]))`
    `q = q / sqrt(sum(q**2) + 1e-6) / sqrt(c)`, `k = k / sqrt(sum(k**2) + 1e-6)`
    `decay = exp(-exp(A) * softplus(a + step))`, `beta = sigmoid(b)`
    `S = S * decay`; `S = S + k (beta * (v - S^T k))^T`; `out[t] = S^T q`

    S begins as zeros. It is kept behind the last token of every block of 64 absolute positions, on
    the page of the block; a page shorter than that is one block. Whatever computes a token begins
    with the state before its block and runs the block's rows again from the pages.

    Args:
        rows: q, k, values, b and a of each head of keys: 2 c + G C + 2 G numbers of X. What lies
            behind them is kept and not read. Or columns of a product, which are arranged so.
        filters: Of the convolution, the oldest token first: Y = W, O = 2 c + G C. Or as weights.
        gates: A and step, one a head of values.
        row_pages: The cache of rows; updated in place where the caller donates it.
        state_pages: Of states: each block of a page has one. Likewise.
        page_table: Page of each P tokens of a sequence.
        positions: Absolute positions, without gaps; -1 marks padding behind them, of which nothing
            is written and whose output is 0. A sequence may begin with a page that an earlier one
            of this call fills; no two write the same page.
        layer: Which layer's pages.
        backend: Which implementation runs.
        norm: Makes the result `gated_rms_norm` of it and of the gates of `rows`, which are columns
            of a product then: all heads of a token, [M, H C].

    Raises:
        ValueError: If a page has another number of states, or a norm has no gates.
        NotImplementedError: If the backend does not do it.

    Numerics:
        float32, one token after the other in order of position. y is rounded to the compute dtype;
        the state and the result are not rounded. Of a head of keys and its values everything has
        one fixed shape. Sums over c are fixed-shape sums of the backend.
        Claims: run-invariant, batch-invariant, schedule-invariant, path-consistent,
        mesh-invariant. Holds while rows are finite.

    Reference:
        Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, eq. 10, in its recurrent form.
    """
    if state_pages.shape[2] != states_of_page(row_pages.shape[4]):
        raise ValueError(
            f"a page of {row_pages.shape[4]} tokens has {states_of_page(row_pages.shape[4])} "
            f"states, not {state_pages.shape[2]}"
        )
    if norm is not None and not isinstance(rows, ProjectedRows):
        raise ValueError("a norm behind the recurrence needs the gates that ProjectedRows have")
    return KERNELS[backend].delta_rule(
        rows, filters, gates, row_pages, state_pages, page_table, positions, layer, norm
    )


def delta_rule_gradient(
    q: Float32[Array, "B T K I"],
    k: Float32[Array, "B T K I"],
    v: Float32[Array, "B T H C"],
    decay: Float32[Array, "B T H"],
    beta: Float32[Array, "B T H"],
    of_out: Float32[Array, "B T H C"],
    lengths: Int32[Array, " B"],
    *,
    backend: Backend,
) -> tuple[
    Float32[Array, "B T K I"],
    Float32[Array, "B T K I"],
    Float32[Array, "B T H C"],
    Float32[Array, "B T H"],
    Float32[Array, "B T H"],
]:
    """The cotangents of what the recurrence of `delta_rule` reads, of whole sequences.

    Forward, with P the state behind the token before, S0 = 0: `R = P decay`, `u = v - R^T k`,
    `w = beta u`, `S = R + k w^T`, `out = S^T q`. Backward, from the last token to the first, with D
    the cotangent of the state behind a token:

    `of_q = S of_out`; `D = D + q of_out^T`; `of_w = D^T k`; `of_beta = sum(of_w u)`;
    `of_v = beta of_w`; `E = D - k of_v^T`; `of_k = D w - R of_v`; `of_decay = sum(E P)`;
    `D = E decay`

    Args:
        q: Normalised and scaled.
        k: Normalised.
        v: Values; head h has the queries and keys of head `h // (H / K)`.
        decay: Of the state.
        beta: Of what is written.
        of_out: Cotangents of the results.
        lengths: Tokens of each sequence; behind them all cotangents are 0.
        backend: Which implementation runs.

    Raises:
        NotImplementedError: If the backend does not do it.

    Numerics:
        float32, nothing is rounded further. States behind each block of 64 positions are computed
        first; then blocks and tokens are walked from the last to the first, and the states of a
        block are computed again from that before it. Sums over channels, and over the heads of
        values of a head of keys, are fixed-shape sums of the backend. A sequence and a head of keys
        meet no other.
        Claims: run-invariant, batch-invariant. Bits depend on (G, I, C, build).

    Reference:
        Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, eq. 10; its derivative.
    """
    return KERNELS[backend].delta_rule_gradient(q, k, v, decay, beta, of_out, lengths)


def gated_rms_norm(
    x: Float32[Array, "M C"],
    z: Activation[Array, "M C"],
    gain: Float32[Array, " C"],
    *,
    eps: float,
    backend: Backend,
) -> Activation[Array, "M C"]:
    """Normalise heads and multiply them by the SiLU of their gates.

    `out[m, c] = round(x[m, c] * rsqrt(mean(x[m]**2) + eps) * gain[c] * (z / (1 + exp(-z))))`

    Args:
        x: Heads as `delta_rule` leaves them.
        z: Gates.
        gain: Of the norm.
        eps: Added to the mean square.
        backend: Which implementation runs.

    Raises:
        NotImplementedError: If the backend does not do it.

    Numerics:
        float32; one rounding at the end. The sum over a row is one fixed-shape sum of the backend.
        Claims: run-invariant, batch-invariant, path-consistent, mesh-invariant.

    Reference:
        Dao and Gu 2024, arXiv:2405.21060, whose norm comes before the gate here.
    """
    return KERNELS[backend].gated_rms_norm(x, z, gain, eps=eps)
