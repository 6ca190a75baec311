# SPDX-License-Identifier: Apache-2.0
"""The package that training needs in addition to those of serving."""

try:
    import optax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "training needs optax, which does not come with detjax alone: pip install 'detjax[train]'"
    ) from error

__all__ = ["optax"]
