"""Devices by name, and by the names that recordings give them."""

import pytest

from kvsim.costs.devices import device_named, devices, recorded_device
from kvsim.errors import UserError


def test_an_unknown_device_is_answered_with_the_nearest_name():
    with pytest.raises(UserError, match="no device called 'rtx409'; did you mean 'rtx4090'"):
        device_named("rtx409")


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTXPRO6000", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
    ],
)
def test_a_recorded_name_is_recognized(title, name):
    assert recorded_device(title).name == name


@pytest.mark.parametrize("title", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-PCIE-40GB", "Tesla T4"])
def test_slower_cards_are_not_taken_for_it(title):
    with pytest.raises(UserError, match="no device called"):
        recorded_device(title)


def test_each_device_is_known_by_its_own_names():
    for device in devices().values():
        assert recorded_device(device.name) is device
        assert recorded_device(device.title) is device
