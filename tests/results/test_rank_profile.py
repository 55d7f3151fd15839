"""One rank's trace alone, and two of one program: every figure below is worked out by hand from the kernels' times."""

import json
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.results.profiler_trace import TraceFile
from dlojz.results.rank_profile import RankProfile, compared, kind_of_kernel, profile_of
from tests.profiled import Event, event, write_trace

MS = 1e-3
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>(int)"


def launched(name: str, launch_s: float, start_s: float, end_s: float, number: int, stream: int = 7) -> list[Event]:
    """A kernel and the call that launches it, which has the same correlation number."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", launch_s, launch_s + 5e-6, correlation=number),
        event("kernel", name, start_s, end_s, stream, correlation=number, stream=stream, device=0),
    ]


def gpu_steps(steps: int = 2, gemm_ms: float = 2.0, step_ms: float = 10.0) -> list[Event]:
    """Product, elementwise beside an all-reduce, an update that comes late; ms of each step: see the comments."""
    events: list[Event] = []
    for step in range(steps):
        at, late_ms = 1.0 + step * step_ms * MS, gemm_ms - 2.0
        events += [event("user_annotation", f"ProfilerStep#{step + 5}", at, at + step_ms * MS)]
        events += [event("gpu_user_annotation", f"ProfilerStep#{step + 5}", at, at + step_ms * MS, 7)]
        # ms of launch, start and end: product; elementwise; all-reduce, of which 0.5 is hidden; update.
        for offset, (name, *times, stream) in enumerate(
            (
                ("sm90_xmma_gemm_bf16", 0.5, 1.0, 3.0 + late_ms, 7),
                ("vectorized_elementwise_kernel<4, relu>", 0.6, 3.0 + late_ms, 4.0 + late_ms, 7),
                ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 0.7, 3.5 + late_ms, 6.0 + late_ms, 20),
                (ADAM, 7.0 + late_ms, 7.1 + late_ms, 8.1 + late_ms, 7),
            )
        ):
            launch_s, start_s, end_s = (at + ms * MS for ms in times)
            events += launched(name, launch_s, start_s, end_s, 10 * step + offset, stream)
    return events


def profile(folder: Path, events: list[Event], name: str = "trace.json", ranks: int = 8) -> RankProfile:
    return profile_of(TraceFile(write_trace(folder / name, 3, events, ranks)))


def test_profile_of_divides_the_time_of_the_steps(tmp_path: Path) -> None:
    events = gpu_steps()
    # Launched before the first step: of no step. A product that stands twice in the file: counted once.
    events += [*launched("sm90_xmma_gemm_bf16", 0.9, 0.95, 0.96, 99), events[3]]
    events += [event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1.0085, 1.010)]
    events += [event("cuda_runtime", "cudaStreamSynchronize", 1.005, 1.006, correlation=98)]
    rank = profile(tmp_path, events)
    assert (rank.rank, rank.world_size, rank.step_mark, rank.steps) == (3, 8, "ProfilerStep", 2)
    assert rank.steps_s == pytest.approx((0.01, 0.01)) and rank.length_s == pytest.approx(0.02)
    assert (rank.outside, rank.repeated) == (1, 1)
    assert rank.parts_s == pytest.approx({"computing": 8 * MS, "exposed": 4 * MS, "idle": 8 * MS, "hidden": 1 * MS})
    (share,) = rank.communication
    assert share.kind == "all_reduce" and share.calls == 2
    assert (share.seconds, share.exposed_s) == pytest.approx((5 * MS, 4 * MS))
    kinds = {row.kind: (row.calls, round(row.seconds, 7)) for row in rank.kinds}
    assert kinds == {"communication": (2, 0.005), "product": (2, 0.004), "elementwise": (4, 0.004)}
    assert rank.kernels[0].name.startswith("nccl") and rank.kernels[0].longest_s == pytest.approx(2.5 * MS)
    facts = rank.launching
    assert facts is not None and (facts.known, facts.kernels, facts.synchronisations) == (8, 8, 1)
    # Gaps: 0 to 1, 6 to 7.1, 8.1 to 11, 16 to 17.1, 18.1 to 20, each before a kernel that is launched within it.
    assert facts.loading_s == pytest.approx(1.5 * MS) and facts.synchronised_s == pytest.approx(1.1 * MS)
    assert facts.running_s == pytest.approx(5.4 * MS) and facts.bound is True
    assert facts.queued_s == facts.unknown_s == 0.0
    # Delays 0.5, 2.4, 2.8 and 0.1 ms, twice each.
    assert facts.delay_s == pytest.approx(1.45 * MS)


def test_profile_of_calls_no_rank_launch_bound_whose_kernels_are_queued(tmp_path: Path) -> None:
    """Twenty kernels of 1 ms, 10 µs apart, launched 20 µs apart: the CPU is far ahead."""
    events = [
        one for n in range(20) for one in launched("gemm", 1 + n * 2e-5, 1.001 + n * 1.01e-3, 1.002 + n * 1.01e-3, n)
    ]
    facts = profile(tmp_path, events).launching
    assert facts is not None and facts.bound is False and facts.running_s == 0.0
    assert facts.queued_s == pytest.approx(19 * 1e-5) and facts.spacing_s == pytest.approx(2e-5)
    without = profile(tmp_path, [one for one in events if one["cat"] == "kernel"]).launching
    assert without is not None and without.bound is None and without.unknown_s == pytest.approx(19 * 1e-5)


def test_profile_of_counts_operators_without_those_that_they_call(tmp_path: Path) -> None:
    """On the CPU: linear of 10 ms calls addmm of 6 ms; two updates end two steps, what follows is of none."""
    events = []
    for step in range(2):
        at = 5.0 + 0.02 * step
        events += [
            event("cpu_op", "aten::linear", at, at + 0.010),
            event("cpu_op", "aten::addmm", at + 0.002, at + 0.008),
            event("cpu_op", "aten::mul", at, at + 0.001, 200),  # another thread
            event("user_annotation", "Optimizer.step#AdamW.step", at + 0.012, at + 0.015),
            event("cpu_op", "aten::_foreach_add_", at + 0.012, at + 0.014),
        ]
    events.append(event("cpu_op", "aten::mul", 5.5, 5.6))
    rank = profile(tmp_path, events)
    assert (rank.step_mark, rank.steps, rank.outside, rank.launching) == ("Optimizer.step", 2, 1, None)
    # The first step begins with the first operator, the second where the first update ends.
    assert rank.steps_s == pytest.approx((0.015, 0.020)) and rank.length_s == pytest.approx(0.035)
    seconds = {row.name: round(row.seconds, 9) for row in rank.kernels}
    assert seconds == {"aten::addmm": 0.012, "aten::linear": 0.008, "aten::_foreach_add_": 0.004, "aten::mul": 0.002}
    assert rank.parts_s["computing"] == pytest.approx(0.024) and rank.parts_s["idle"] == pytest.approx(0.011)


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "communication"),  # RCCL, too
        ("void c10d::symmetric_memory::(anonymous namespace)::two_shot_all_reduce_kernel<float>", "communication"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "product"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64", "product"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw", "product"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)", "normalisation"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "normalisation"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>", "normalisation"),
        ("Memcpy HtoD (Pageable -> Device)", "copy"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tensor)>", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("triton_poi_fused_gelu_3", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("aten::normal_", "other"),
        ("my_own_kernel", "other"),
    ],
)  # fmt: skip
def test_kind_of_kernel_follows_from_the_names_that_libraries_give(kernel: str, kind: str) -> None:
    assert kind_of_kernel(kernel) == kind


def test_compared_normalises_per_step_and_names_the_slower_kernel(tmp_path: Path) -> None:
    """Two steps of 10 ms; three of 11 ms, in which the product takes 3 ms for 2."""
    before = profile(tmp_path, gpu_steps(), "before.json")
    after = profile(tmp_path, gpu_steps(3, 3.0, 11.0), "after.json")
    both = compared(before, after)
    assert both.per_step and both.length.difference_s == pytest.approx(1 * MS)
    assert {row.name: round(row.difference_s, 7) for row in both.parts} == {
        "computing": 0.001, "exposed": 0.0, "idle": 0.0, "hidden": 0.0,
    }  # fmt: skip
    largest = both.kernels[0]
    assert largest.name == "sm90_xmma_gemm_bf16" and (largest.before_calls, largest.after_calls) == (1, 1)
    assert (largest.before_s, largest.after_s, largest.by_calls_s) == pytest.approx((2 * MS, 3 * MS, 0.0))
    assert all(abs(row.difference_s) < 1e-9 for row in both.kernels[1:])


def test_compared_refuses_what_is_not_of_the_same_kind(tmp_path: Path) -> None:
    gpu = profile(tmp_path, gpu_steps())
    unmarked = profile(tmp_path, launched("gemm", 1.0, 1.1, 1.2, 1))
    cpu = profile(tmp_path, [event("cpu_op", "aten::mm", 1.0, 2.0)])
    with pytest.raises(LabError, match="has 2 steps marked and trace.json none"):
        compared(unmarked, gpu)
    with pytest.raises(LabError, match="has kernels of a device and trace.json operators of the CPU alone"):
        compared(cpu, unmarked)
    with pytest.raises(LabError, match="no operator and no kernel runs within the 1 steps"):
        profile(tmp_path, [event("user_annotation", "ProfilerStep#1", 0, 1), event("kernel", "gemm", 2, 3, 7)])


def test_profile_of_reads_the_categories_of_older_and_of_other_profilers(tmp_path: Path) -> None:
    """Kineto up to torch 1.12 wrote Kernel and Runtime; ROCm launches by hip…, Intel's XPU by xpu_runtime."""
    calls = (
        ("Runtime", "cudaLaunchKernel"),
        ("cuda_runtime", "hipLaunchKernel"),
        ("xpu_runtime", "urEnqueueKernelLaunch"),
    )
    for number, (launch, call) in enumerate(calls):
        events = launched("Cijk_Ailk", 1.0, 1.1, 1.2, 1)
        events[0] |= {"cat": launch, "name": call}
        events[1] |= {"cat": "Kernel" if launch == "Runtime" else "kernel"}
        rank = profile(tmp_path, events, f"resnet50_{number}.json")
        assert rank.launching is not None and rank.launching.known == 1 and rank.kernels[0].kind == "product"


def test_profile_of_takes_no_number_of_a_name_for_a_rank(tmp_path: Path) -> None:
    events = launched("gemm", 1.0, 1.1, 1.2, 1)
    for name, rank in (("resnet50.json", None), ("run_rank7.json", 7)):
        (tmp_path / name).write_text(json.dumps(events))
        assert profile_of(TraceFile(tmp_path / name)).rank == rank
