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
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA GeForce RTX 4070 SUPER", "rtx4070s"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090-laptop"),
        ("Apple M4 Max", "m4-max"),
    ],
)
def test_a_recorded_name_is_recognized(title, name):
    assert recorded_device(title).name == name


@pytest.mark.parametrize("title", ["Tesla T4", "Radeon VII"])
def test_what_is_not_known_is_not_taken_for_another(title):
    with pytest.raises(UserError, match="no device called"):
        recorded_device(title)


@pytest.mark.parametrize("device", devices().values(), ids=lambda device: device.name)
def test_each_device_is_known_by_its_title_and_says_whence_its_figures_are(device):
    assert recorded_device(device.title) is device
    assert device.source
    assert device.memory_source
    assert (device.tflops_fp8 or device.tflops) >= device.tflops


MINE = """
kind = "consumer"
memory_bytes = 12_000_000_000
bandwidth_gb_s = 360
tflops = 25.5
"""


def test_ones_own_device_is_a_file(tmp_path):
    (tmp_path / "my.toml").write_text(MINE)
    device = device_named(str(tmp_path / "my.toml"))
    assert (device.name, device.bandwidth_gb_s, device.peak_s("fp8")) == ("my", 360, 25.5e12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"mine\.toml: cannot be read: No such file"),
        ("kind = ", r"mine\.toml: not TOML"),
        (
            MINE.replace("360", "-1"),
            r"mine\.toml: bandwidth_gb_s: input should be greater than 0; keys are name, title",
        ),
        (MINE + "speed = 3", r"mine\.toml: speed: extra inputs are not permitted"),
        (MINE.replace("consumer", "toaster"), r"mine\.toml: kind: input should be 'datacentre', 'consumer'"),
    ],
)
def test_a_file_that_describes_no_device_is_answered_in_a_line(tmp_path, text, said):
    if text is not None:
        (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=said) as found:
        device_named(str(tmp_path / "mine.toml"))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("bus", "carried"), [("PCIe 5.0 x16", 48), ("PCIe 4.0 x8", 12), ("unified memory", 360), ("another", 24)]
)
def test_the_rate_of_a_bus_is_that_of_its_kind_unless_said(tmp_path, bus, carried):
    (tmp_path / "my.toml").write_text(MINE + f'bus = "{bus}"\n')
    (tmp_path / "said.toml").write_text(MINE + f'bus = "{bus}"\nbus_gb_s = 20\n')
    assert (device_named(str(tmp_path / "my.toml")).bus_gb_s, device_named(str(tmp_path / "said.toml")).bus_gb_s) == (
        carried,
        20,
    )
