# SPDX-License-Identifier: Apache-2.0
"""Find the operation behind a difference: tap the request that differs in two settings."""

from collections.abc import Mapping, Sequence

from detjax.certify.cases import setting_like
from detjax.certify.certificate import Outcome
from detjax.certify.subject import Subject
from detjax.diverge.find import find_divergence
from detjax.diverge.setting import Setting
from detjax.engine.requests.request import Request
from detjax.models.loading import LoadedModel
from detjax.parallel.mesh import DP_AXIS, TP_AXIS


def diagnose(
    outcome: Outcome, subject: Subject, requests: Sequence[Request], others: Sequence[Subject]
) -> str:
    """Return what `detjax.diverge` finds for a case that differs, or why it finds nothing.

    The request runs alone on the first mesh, and then as in the case but among requests of another
    kind. A fault that needs exactly the same neighbours may not appear.

    Args:
        outcome: A case that differs.
        subject: On the first mesh.
        requests: Those of its round.
        others: The subject on other meshes.
    """
    if not outcome.setting:
        return ""
    request = requests[outcome.request_idx]
    models: Mapping[tuple[int, int], LoadedModel] = {
        (its.model.mesh.shape[DP_AXIS], its.model.mesh.shape[TP_AXIS]): its.model
        for its in (subject, *others)
    }
    try:
        found = find_divergence(
            lambda setting: models[setting.dp, setting.tp],
            request.prompt_token_ids,
            setting_like(subject),
            Setting.parse(outcome.setting),
            sampling=request.sampling,
        )
    except (ValueError, NotImplementedError, RuntimeError, FloatingPointError) as error:
        return f"the operation could not be looked for: {error}"
    return str(found)
