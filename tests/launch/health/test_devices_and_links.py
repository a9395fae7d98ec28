"""GPU memory, peer-to-peer, all-reduce and kernels as findings of given readings."""

from rolemesh.launch.health import devices, kernels, links

GPUS = "0, GPU-a, 512, 81559\n1, GPU-b, 40960, 81559\n2, GPU-c, 9000, 81559\n"
APPS = "GPU-b, 4242, 40448, python, train.py\n"


def test_memory_of_a_gpu_that_others_hold_is_told_with_who_they_are():
    one, two = devices.held_memory(GPUS, APPS)
    assert one.name == "memory of GPU 1"
    assert "process 4242 (python, train.py, 40448 MiB)" in one.problem
    assert "kill PID" in one.fix
    assert "another container's" in two.problem
    assert list(devices.held_memory("", "")) == []
    assert list(devices.held_memory("0, GPU-a, [N/A], 81559", "")) == []


def test_pairs_that_do_not_reach_each_other_are_named():
    reach = [[True, True, False], [True, True, True], [False, True, True]]
    (finding,) = links.peers(reach)
    assert finding.value == "2 of 3 pairs of GPUs reach each other"
    assert "(0-2)" in finding.problem
    assert "iommu=pt" in finding.fix
    assert not next(iter(links.peers([[True, True], [True, True]]))).problem
    assert list(links.peers([])) == []


def reading(**changes):
    return {
        "kind": "cuda", "world": 8, "bytes": 1 << 28, "seconds": 0.0015, "right": True,
        "device": "NVIDIA H100 80GB HBM3", "peers": [],
    } | changes  # fmt: skip


def test_an_all_reduce_is_laid_beside_the_devices_profile():
    good = links.all_reduce(reading())
    assert "GB/s each way" in good.value
    assert "of profile h100" in good.value
    assert not good.problem
    slow = links.all_reduce(reading(seconds=0.05))
    assert "less than 40% of the profile" in slow.problem
    assert "nvidia-smi topo -m" in slow.fix
    assert not slow.required
    assert "no profile of" in links.all_reduce(reading(device="Made up 1")).value


def test_a_wrong_sum_and_a_reduction_that_does_not_end_are_failures():
    wrong = links.all_reduce(reading(right=False))
    assert wrong.required
    assert "data is damaged" in wrong.problem
    hangs = links.failed("cuda", 8, "not done within 60 s")
    assert hangs.required
    assert "NCCL_DEBUG=INFO" in hangs.fix


def test_a_kernel_that_fails_or_differs_is_broken_and_one_that_is_absent_a_warning():
    good = kernels.judged({"name": "C++", "form": "avx2", "off": 1e-7, "tolerance": 1e-4})
    assert good.value == "runs (avx2), 1.0e-07 from torch"
    assert not good.problem
    wrong = kernels.judged({"name": "triton", "off": float("inf"), "tolerance": 1e-2})
    assert wrong.required
    assert "ROLEMESH_KERNELS=reference" in wrong.fix
    failing = kernels.judged({"name": "flash-attn", "error": "ImportError: undefined symbol"})
    assert failing.required
    assert "undefined symbol" in failing.problem
    absent = kernels.judged({"name": "C++", "skipped": "not built", "problem": "slower", "fix": "build it"})
    assert absent.problem
    assert not absent.required
