"""A measured profile: what a file says, the data sheet for the rest, through to the cost models."""

from dataclasses import replace

import pytest
from plan_requests import ppo

from rolemesh.placement.cluster import ClusterSpec
from rolemesh.placement.costs import DeviceSet
from rolemesh.placement.hardware import HardwareError, hardware, load_profile
from rolemesh.placement.roles import PlannerCosts
from rolemesh.placement.timing.efficiency import Machine, efficiency
from rolemesh.placement.timing.gemm import gemm_seconds
from rolemesh.placement.timing.links import Links

FILE = """
device: h100-80
figures:
  tflops: [{bfloat16: 700, float32: 50}, measured]
  memory_gb_per_s: [3000, measured]
  latency: [2.5, measured]
constants:
  gemm16: [0.5, measured]
factors:
  train: {factor: 1.25, operations: 4}
curves: {gemm: [[bfloat16, 1, 1, 1, 1.0e-6]]}
"""


@pytest.fixture
def profile(tmp_path):
    (tmp_path / "h100.yaml").write_text(FILE)
    return load_profile(tmp_path / "h100.yaml")


def test_measured_figures_replace_the_data_sheets_and_carry_their_source(profile):
    sheet = hardware("h100-80")
    assert profile.peak_flops("bfloat16") == 700e12
    assert profile.peak_flops("float8") == sheet.peak_flops("float8")
    assert profile.memory_bytes_per_s == 3000e9
    assert profile.link_bytes_per_s == sheet.link_bytes_per_s
    assert profile.sources["memory_bytes_per_s"] == profile.sources["gemm16"] == "measured"
    assert profile.sources["link_bytes_per_s"] == sheet.sources["link_bytes_per_s"]
    assert (profile.factor("train"), profile.factor("infer")) == (1.25, 1.0)


def test_the_time_model_uses_measured_constants(profile):
    machine = Machine.of(profile)
    assert machine.efficiency.gemm16 == 0.5
    assert machine.efficiency.flash == efficiency("h100-80").flash
    large = 16384
    exact = 2 * large**3 / (700e12 * 0.5 * efficiency("h100-80").power)
    assert gemm_seconds(large, large, large, machine, "bfloat16") == pytest.approx(exact, rel=0.05)
    assert Links.of_profile(profile).latency == 2.5


def test_a_cluster_knows_its_devices_by_measured_profiles_and_nodes_still_state_their_own(profile):
    text = (
        "nodes: [{name: a, device: h100-80, devices: 8, nic_gb_per_s: 12.5}, {device: a100-80, devices: 8}]"
    )
    cluster = ClusterSpec.from_yaml(text).with_profiles(profile)
    assert cluster.profile("H100").peak_flops("bfloat16") == 700e12
    assert cluster.profile("H100").nic_bytes_per_s == 12.5e9
    assert cluster.profile("A100") == ClusterSpec.from_yaml(text).profile("A100")
    assert cluster.bytes_per_s(*cluster.nodes) == 12.5e9


def test_slots_too(tmp_path):
    (tmp_path / "cpu.yaml").write_text("device: cpu\nfigures: {tflops: [{float32: 0.1}, measured]}\n")
    cluster = ClusterSpec.uniform(1, 4, device_kind="cpu").with_profiles(load_profile(tmp_path / "cpu.yaml"))
    assert cluster.profile("cpu").peak_flops("float32") == pytest.approx(0.1e12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device: h101-80", "did you mean h100-80"),
        ("device: cpu\nfigures: {memory_gb_per_sec: [1, x]}", "did you mean memory_gb_per_s"),
        ("device: cpu\nconstants: {gem16: [1, x]}", "did you mean gemm16"),
        ("device: cpu\nconstants: {gemm16: [0, x]}", "gemm16 must be above 0"),
        ("device: cpu\nconstants: {gemm16: 1}", "cpu.yaml"),
        ("nodes: 1", "rolemesh calibrate"),
        ("[", "no profile can be read"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path, text, said):
    (tmp_path / "cpu.yaml").write_text(text)
    with pytest.raises(HardwareError, match=said) as error:
        load_profile(tmp_path / "cpu.yaml")
    assert "cpu.yaml" in str(error.value)


def test_what_runs_told_multiplies_every_operation_of_its_kind():
    """Equal options, each second of a kind longer by its factor, and floors still below."""
    factors = {"train": 2.0, "infer": 1.5, "generate": 3.0, "transfer": 4.0}
    request = ppo("1 x h100x4")
    told = replace(hardware("h100-80"), factors=factors)
    corrected = replace(request, cluster=request.cluster.with_profiles(told))
    before, after = PlannerCosts(request), PlannerCosts(corrected)
    devices = DeviceSet("h100-80", (4,))
    for role in ("actor", "rollout", "critic"):
        floor = after.floor_s(role, devices)
        corrected_options = {cost.option: cost for cost in after.options(role, devices)}
        kept = [
            cost for cost in before.options(role, devices) if not cost.option.offload
        ]  # which brings back
        assert {cost.option for cost in kept} <= set(corrected_options)
        for one in kept:
            other = corrected_options[one.option]
            for name, seconds in one.seconds.items():
                kind = request.graph[name].kind if request.graph[name].state_reads else ""
                assert other.seconds[name] == pytest.approx(seconds * factors.get(kind, 1.0)), name
                assert other.seconds[name] >= floor[name]
    actor, rollout = (before.options(role, devices)[0] for role in ("actor", "rollout"))
    moved = [
        costs.transfer_s("sync_weights", actor, devices, rollout, devices, together=True)
        for costs in (before, after)
    ]
    assert moved[1] == pytest.approx(4 * moved[0])
