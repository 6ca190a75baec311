# SPDX-License-Identifier: Apache-2.0
"""Where GPUs cannot reach one another, or have few multiprocessors, other forms of the sum run."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from detjax.pallas_kernels.backend import Backend
from detjax.parallel import peer_access
from detjax.parallel.exchange import adds_tiles, exchange_shapes, why_no_exchange
from detjax.parallel.mesh import DP_AXIS, TP_AXIS

REACHES = "does not reach the memory of"


def gpu(index: int, cores: int = 132) -> jax.Device:
    """A GPU that answers questions only."""
    return mock.Mock(
        spec=jax.Device, platform="gpu", core_count=cores, id=index, process_index=0,
        local_hardware_id=index, device_kind="NVIDIA H100 PCIe", __str__=lambda _: f"cuda:{index}",
    )  # fmt: skip


def mesh_of(dp: int, tp: int, *cores: int) -> Mesh:
    numbers = itertools.zip_longest(range(dp * tp), cores, fillvalue=132)
    devices = np.array([gpu(i, count) for i, count in numbers], object)
    return Mesh(devices.reshape(dp, tp), (DP_AXIS, TP_AXIS))


class Driver:
    """What libcuda says of pairs that cannot reach each other."""

    def __init__(self, *apart: tuple[int, int], error: int = 0):
        self.apart, self.error = set(apart), error

    def cuDeviceGet(self, handle, ordinal: int) -> int:
        handle._obj.value = 100 + ordinal
        return 0

    def cuDeviceCanAccessPeer(self, can, device, peer) -> int:
        can._obj.value = (device.value - 100, peer.value - 100) not in self.apart
        return self.error


@pytest.mark.parametrize(
    ("apart", "dp", "tp", "reason"),
    [
        ((), 1, 4, None),
        (((1, 3),), 1, 4, f"cuda:1 {REACHES} cuda:3"),
        # One way is enough: a rank writes to every peer.
        (((1, 0),), 1, 2, f"cuda:1 {REACHES} cuda:0"),
        # Ranks of two replicas never exchange anything.
        (((0, 2), (2, 0), (1, 3)), 2, 2, None),
        (((2, 3),), 2, 2, f"cuda:2 {REACHES} cuda:3"),
    ],
)
def test_ranks_that_cannot_reach_each_other_have_no_exchange(monkeypatch, apart, dp, tp, reason):
    monkeypatch.setattr(peer_access, "_load_driver", lambda: Driver(*apart))
    found = why_no_exchange(mesh_of(dp, tp), width=4096, backend=Backend.SM90)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_without_an_answer_there_is_no_exchange(monkeypatch):
    monkeypatch.setattr(peer_access, "_load_driver", lambda: Driver(error=3))
    found = why_no_exchange(mesh_of(1, 2), width=4096, backend=Backend.SM90)
    assert found is not None and "cuDeviceCanAccessPeer of libcuda.so.1 returned error 3" in found

    monkeypatch.undo()
    monkeypatch.setattr(peer_access, "_DRIVER", "libno-driver-of-this-name.so")
    peer_access._load_driver.cache_clear()
    found = why_no_exchange(mesh_of(1, 2), width=4096, backend=Backend.SM90)
    assert found is not None and "libno-driver-of-this-name.so" in found


def test_devices_that_are_no_gpus_are_not_asked():
    assert peer_access.why_no_peers(jax.devices("cpu")) is None


@pytest.mark.parametrize(
    ("cores", "width", "has_tiles"),
    [
        ((132, 132), 8192, True),
        ((132, 132), 8448, True),
        ((132, 132), 8512, False),
        ((114, 114), 7296, True),  # H100 PCIe
        ((114, 114), 8192, False),
        ((132, 114), 8192, False),  # the smaller one decides for both
        ((78, 78), 4096, True),  # H20
        ((78, 78), 5120, False),
    ],
)
def test_products_exchange_their_tiles_where_all_are_resident(cores, width, has_tiles):
    exchange = exchange_shapes(
        mesh_of(1, 2, *cores), width=width, dtype=jnp.dtype(jnp.bfloat16), backend=Backend.SM90
    )
    x, w = jax.ShapeDtypeStruct((8, 2048), jnp.bfloat16), jnp.zeros((width, 1), jnp.bfloat16)
    assert (exchange.tiles is not None) == has_tiles
    assert adds_tiles(exchange, x, w, backend=Backend.SM90) == has_tiles
    assert exchange.rows.parities.shape == (1, 2, 128), "the kernel behind a product runs anywhere"


def test_a_product_wider_than_its_mailboxes_is_left_to_the_kernel_behind_it():
    exchange = exchange_shapes(
        mesh_of(1, 2), width=1024, dtype=jnp.dtype(jnp.bfloat16), backend=Backend.SM90
    )
    x = jax.ShapeDtypeStruct((8, 2048), jnp.bfloat16)
    for width, is_taken in ((1024, True), (1088, False)):
        w = jax.ShapeDtypeStruct((width, 2048), jnp.bfloat16)
        assert adds_tiles(exchange, x, w, backend=Backend.SM90) == is_taken
