"""Hardware profiles: figures as the data sheets print them, each with a source."""

import dataclasses

import pytest

from rolemesh.placement.hardware import GIB, HardwareError, hardware, profiles

# Dense bf16 (V100, T4: fp16) TFLOP/s, memory TB/s, NVLink (0: none) and network GB/s per direction.
PRINTED = {
    "V100-SXM2 16/32GB": (125, 0.9, 150, None),
    "T4": (65, 0.32, 0, None),
    "A100-40GB SXM": (312, 1.555, 300, 25),
    "A100-80GB SXM": (312, 2.039, 300, 25),
    "A800-80GB SXM": (312, 2.039, 200, None),
    "H100-80GB SXM": (989, 3.35, 450, 50),
    "H100-96GB HBM2e (500 W)": (989, 2.4, 450, 50),
    "H800-80GB": (989, 3.35, 200, 50),
    "H20-96GB": (148, 4.0, 450, 50),
    "H200-141GB": (989, 4.8, 450, 50),
    "B200-180GB": (2250, 7.7, 900, 50),
    "GB200 (per GPU)": (2450, 8.0, 900, 50),
    "B300": (2250, 7.7, 900, 100),
    "GB300 (per GPU)": (2450, 8.0, 900, 100),
    "L40S": (362.05, 0.864, 0, None),
    "A10": (125, 0.6, 0, None),
    "A10G": (70, 0.6, 0, None),
    "RTX 4090": (165, 1.008, 0, None),
    "RTX A6000": (155, 0.768, 56, None),
}


@pytest.mark.parametrize("device", PRINTED)
def test_figures_are_those_of_the_data_sheets(device):
    tflops, memory_tb_s, link, nic = PRINTED[device]
    profile = hardware(device)
    assert profile.peak_flops("float16") == pytest.approx(tflops * 1e12)
    assert profile.memory_bytes_per_s == pytest.approx(memory_tb_s * 1e12)
    assert profile.link_bytes_per_s == pytest.approx((link or profile.pcie_bytes_per_s / 1e9) * 1e9)
    assert nic is None or profile.nic_bytes_per_s == nic * 1e9


def test_recipes_names_and_aliases_are_found_in_any_case():
    for name, profile in profiles().items():
        assert hardware(name) is hardware(name.upper()) is profile
        assert all(hardware(alias) is profile for alias in profile.aliases)
    assert hardware("H100").name == "h100-80"
    assert hardware("cpu").device_kind == "cpu"
    assert len(profiles()) == len(PRINTED) + 2  # V100 in two sizes, the CPU slot


def test_usable_memory_is_a_little_below_the_printed_one():
    for name, profile in profiles().items():
        if name != "cpu":
            printed = int(name.rsplit("-", 1)[1])
            assert 0.9 * printed < profile.memory_bytes / GIB < printed


def test_dtypes_the_device_lacks_are_refused():
    for name in ("v100-16", "v100-32", "t4-16"):
        assert "bfloat16" not in hardware(name).dtypes
        with pytest.raises(HardwareError, match=f"{name} has no bfloat16; it has float16, float32"):
            hardware(name).peak_flops("bfloat16")
    with pytest.raises(HardwareError, match="a100-80 has no float8"):
        hardware("a100-80").peak_flops("float8")
    assert hardware("h200-141").peak_flops("float8") == pytest.approx(1979e12)


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(HardwareError, match=r"'h10-80'.*did you mean h100-80\?"):
        hardware("h10-80")


def test_a_figure_without_a_source_is_refused():
    profile = hardware("h100-80")
    with pytest.raises(HardwareError, match="no source for nic_bytes_per_s"):
        dataclasses.replace(profile, sources={**profile.sources, "nic_bytes_per_s": ""})
    with pytest.raises(HardwareError, match="memory_bytes must be above 0"):
        dataclasses.replace(profile, memory_bytes=0)
    assert hash(profile)
