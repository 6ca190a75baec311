# SPDX-License-Identifier: Apache-2.0
"""Whether the GPUs of this process can read and write one another's memory, as the driver says.

XLA opens the memory of every pair that can. A kernel that writes to another is an illegal address.
"""

import ctypes
import functools
from collections.abc import Iterable

import jax

_DRIVER = "libcuda.so.1"


def why_no_peers(devices: Iterable[jax.Device]) -> str | None:
    """Say which two devices cannot reach each other's memory; None if all can, or are no GPUs.

    Args:
        devices: Of this process.
    """
    gpus = [device for device in devices if device.platform == "gpu"]
    for one in gpus:
        for other in gpus:
            if one is other:
                continue
            try:
                can = _can_access(_ordinal(one), _ordinal(other))
            except OSError as error:
                return f"nothing says whether {one} reaches the memory of {other}: {error}"
            if not can:
                return f"{one} does not reach the memory of {other} (no NVLink or PCIe peer access)"
    return None


def _ordinal(device: jax.Device) -> int:
    if device.local_hardware_id is None:
        raise OSError(f"{device} has no number of the driver's")
    return device.local_hardware_id


def _can_access(device: int, peer: int) -> bool:
    """Whether a device reaches a peer's memory, by the driver's numbers in this process.

    Raises:
        OSError: If there is no driver, or it refuses to say.
    """
    driver = _load_driver()
    handles = [ctypes.c_int(), ctypes.c_int()]
    for handle, ordinal in zip(handles, (device, peer), strict=True):
        _check(driver.cuDeviceGet(ctypes.byref(handle), ordinal), "cuDeviceGet")
    can = ctypes.c_int()
    _check(driver.cuDeviceCanAccessPeer(ctypes.byref(can), *handles), "cuDeviceCanAccessPeer")
    return bool(can.value)


@functools.cache
def _load_driver() -> ctypes.CDLL:
    driver = ctypes.CDLL(_DRIVER)
    _check(driver.cuInit(0), "cuInit")
    return driver


def _check(status: int, call: str) -> None:
    if status:
        raise OSError(f"{call} of {_DRIVER} returned error {status}")
