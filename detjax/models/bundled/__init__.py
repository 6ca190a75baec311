# SPDX-License-Identifier: Apache-2.0
"""The model that comes with the package, which `tools/train_tiny.py` trained."""

from pathlib import Path

BUNDLED, BUNDLED_NAME = "bundled", "novels-6m"
"""Both name it."""


def bundled_model_path() -> Path:
    """Return the folder of the bundled model.

    Raises:
        FileNotFoundError: If the package was installed without its data files.
    """
    folder = Path(__file__).parent / BUNDLED_NAME
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the bundled model is not at {folder}: this copy of detjax has no data files; "
            "install it again, or give --model DIR"
        )
    return folder
