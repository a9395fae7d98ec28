"""Time and peak memory of calls: `from measure import medians, peak_bytes, peak_tensor_bytes`."""

import ctypes
import gc
import itertools
import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

# glibc's M_MMAP_THRESHOLD: blocks from this size on are mapped and given back alone.
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM, _USUAL_MOST = 1 << 20, 32 << 20


def medians(calls: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu") -> dict[str, float]:
    """Median seconds of each call. They take turns: a busy moment meets all of them.

    Each turn begins with a call that is not timed, so that none pays for memory that another gave back.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            call()
            times[name].append(_seconds(call, device))
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """Bytes by which memory grows at most while `call` runs, its result included: on a CPU this process's."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)  # what was freed before would hide what is taken now
    # Holes that the allocator keeps between freed blocks are chance, up to twice a call's own memory.
    libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
        before = _status("VmRSS")
        result = call()
        del result
        return _status("VmHWM") - before
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, _USUAL_MOST)


def peak_tensor_bytes(call: Callable[[], object]) -> int:
    """Bytes of CPU tensors, those inside operations included, that `call` holds at once at most.

    For a process that did other work before, whose allocator has holes that `peak_bytes` would count.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        result = call()
    del result
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def _seconds(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024
