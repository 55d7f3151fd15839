"""What is traced without memory against what a real run allocates, and against published formulas."""

import gc
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.models.foreign.vision_packages import ensure_torchvision_imports
from dlojz.models.qwen_deepseek import LatentAttention
from dlojz.models.sizes import DEEPSEEK_SIZES
from dlojz.prediction.rules_of_thumb import Shape, layer_bytes
from dlojz.prediction.trace import Compute, CudaOverrides, StorageTracker, trace
from dlojz.train.dispatch_trace import StorageTrace

Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]


def images(side: int, batch: int = 2) -> Callable[[], Tensor]:
    return lambda: torch.zeros(batch, 3, side, side)


def tokens(length: int, batch: int = 2) -> Callable[[], Tensor]:
    return lambda: torch.zeros(batch, length, dtype=torch.long)


def resnet() -> nn.Module:
    ensure_torchvision_imports()
    import timm

    model: nn.Module = timm.create_model("resnet18", num_classes=10)
    return model


class Dropout(nn.Module):
    """A block with what the catalogue's models lack."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.gelu(self.first(x)), 0.1))


CASES: dict[str, Case] = {
    "coatnet": (lambda: models.build("coatnet_tiny"), images(64)),
    "coatnet-0": (lambda: models.build("coatnet_0", image_size=64), images(64, 1)),
    "vit": (lambda: models.build("vit_tiny"), images(64)),
    "gpt": (lambda: models.build("gpt_tiny"), tokens(128)),
    "llama": (lambda: models.build("llama_tiny"), tokens(64)),
    "llama-every-second": (lambda: models.build("llama_tiny", checkpointing="every_second"), tokens(64)),
    "qwen": (lambda: models.build("qwen_tiny"), tokens(64)),
    "latent": (lambda: LatentAttention(DEEPSEEK_SIZES["deepseek_tiny"]), lambda: torch.zeros(2, 32, 128)),
    "coatnet-checkpointed": (lambda: models.build("coatnet_tiny", checkpointing="full"), images(64)),
    "vit-selective": (lambda: models.build("vit_tiny", checkpointing="selective"), images(64)),
    "gpt-checkpointed": (lambda: models.build("gpt_tiny", checkpointing="full"), tokens(64)),
    "resnet": (resnet, images(64)),
    "dropout": (Dropout, lambda: torch.zeros(8, 64)),
}


def really_allocated(module: nn.Module, batch: Tensor, compute: Compute) -> tuple[int, int]:
    """Bytes alive after forward, and the largest sum within forward and backward, weights not counted."""
    states = [*module.parameters(), *module.buffers()]
    with StorageTrace({}) as seen:
        for tensor in states:
            seen.see(tensor)
        states_bytes = sum(seen.live_bytes.values())
        inputs = batch.clone()
        context = torch.autocast("cpu", torch.bfloat16) if compute == "autocast" else nullcontext()
        with context:
            output = module(inputs.bfloat16() if compute == "bf16" and inputs.is_floating_point() else inputs)
        loss = torch.stack([output.float().sum()]).sum()
        del output
        gc.collect()
        kept = sum(seen.live_bytes.values()) - states_bytes
        loss.backward()
    held = peak = 0
    for event in seen.trace.storages:
        held += event.delta_bytes
        peak = max(peak, held)
    return kept, peak - states_bytes


HALF = ("coatnet", "vit", "gpt-checkpointed", "dropout")
TRACED = [*((name, "fp32") for name in CASES), *((name, compute) for name in HALF for compute in ("autocast", "bf16"))]
DAILY = {
    *((name, "fp32") for name in ("coatnet", "vit", "gpt", "llama", "gpt-checkpointed", "dropout")),
    *(("gpt-checkpointed", "autocast"), ("dropout", "bf16")),
}


@pytest.mark.parametrize(
    ("name", "compute"),
    [case if case in DAILY else pytest.param(*case, marks=pytest.mark.nightly) for case in TRACED],
)
def test_a_trace_without_memory_equals_a_real_run(name: str, compute: Compute) -> None:
    """To the byte, but for what a few operators do with numbers that are there: 0.2 % covers all of these."""
    build, batch = CASES[name]
    torch.manual_seed(0)
    module = build()
    if compute == "bf16":
        module = module.bfloat16()
    real_kept, real_peak = really_allocated(module, batch(), compute)
    for parameter in module.parameters():
        parameter.grad = None
    traced = trace(module, batch(), compute=compute)
    exact = compute == "fp32"
    assert traced.saved_bytes == pytest.approx(real_kept, abs=16, rel=0 if exact else 0.002)
    assert traced.peak_bytes == pytest.approx(real_peak, abs=16, rel=0 if exact else 0.002)
    assert all(parameter.grad is None for parameter in module.parameters()), "the module stays untouched"
    assert not any("Fake" in type(tensor).__name__ for tensor in module.parameters())


class MegatronLayer(nn.Module):
    """The layer that Korthikanti et al. count: two layer norms, attention with its dropouts, an MLP, in (s, b, h)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.expand, self.reduce = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        attended = self._attend(self.norm1(x))
        x = x + torch.native_dropout(self.project(attended), 0.1, True)[0]
        hidden = self.reduce(F.gelu(self.expand(self.norm2(x))))
        return x + torch.native_dropout(hidden, 0.1, True)[0]

    def _attend(self, x: Tensor) -> Tensor:
        length, batch, hidden = x.shape
        q, k, v = (
            part.reshape(length, batch * self.heads, -1).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = torch.baddbmm(q.new_empty(q.shape[0], length, length), q, k.transpose(1, 2), beta=0.0)
        shares = torch.native_dropout(torch.softmax(scores, dim=-1), 0.1, True)[0]
        return torch.bmm(shares, v).transpose(0, 1).reshape(length, batch, hidden)


@pytest.mark.parametrize(("hidden", "heads"), [(6144, 64), (12288, 96), (20480, 128), (25600, 160)])
def test_the_traced_layer_is_the_published_formula_and_the_statistics_of_its_norms(hidden: int, heads: int) -> None:
    """sbh(34 + 5as/h) of Korthikanti et al. 2022, §4.1, at the four sizes of its table 3; and 8·s·b bytes that the
    formula leaves out: mean and deviation of two layer norms, 2 bytes each (4 on a GPU)."""
    length, batch = 2048, 1
    with torch.device("meta"):
        layer = MegatronLayer(hidden, heads)
        x = torch.empty(length, batch, hidden, dtype=torch.bfloat16)
    shape = Shape(sequence_length=length, micro_batch=batch, hidden=hidden, heads=heads)
    for on_gpu, statistics_bytes in ((False, 8), (True, 16)):
        traced = trace(layer.bfloat16(), x, compute="bf16", on_gpu=on_gpu)
        # What forward leaves alive besides: the layer's output and its sum, of which backward needs only the shape.
        kept = traced.saved_bytes - traced.bytes_of[max(traced.kept)]
        difference = kept - layer_bytes(shape)
        assert difference == statistics_bytes * length * batch


def test_torch_s_own_tracker_agrees() -> None:
    """`MemTracker` of torch, slower and with categories of its own: the same peak to 0.1 %."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        on_meta = models.build("vit_s_16", num_classes=10)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = on_meta.to_empty(device="cpu")
        batch = torch.empty(4, 3, 224, 224)
        tracker = MemTracker()
        tracker.track_external(model, batch)
        with tracker:
            model(batch).sum().backward()
        theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    with torch.device("meta"):
        model, batch = models.build("vit_s_16", num_classes=10), torch.empty(4, 3, 224, 224)
    states_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert trace(model, batch).peak_bytes + states_bytes == pytest.approx(theirs["Total"], rel=1e-3)


class Depends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if bool(y.sum() > 0) else y


@pytest.mark.parametrize(
    ("module", "inputs", "words"),
    [
        (Depends(), torch.zeros(2, 4), "depends on the values of its data"),
        (nn.Linear(4, 4), torch.zeros(2, 5), "does not run on these inputs"),
        (nn.Flatten(), torch.zeros(2, 5), "nothing in the module's output depends on its parameters"),
    ],
)
def test_trace_refuses_in_one_sentence_what_cannot_be_traced(module: nn.Module, inputs: Tensor, words: str) -> None:
    with pytest.raises(LabError, match=words) as refusal:
        trace(module, inputs)
    assert "\n" not in str(refusal.value)
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter, "the module has its own parameters back"


def test_bytes_are_told_by_module() -> None:
    traced = trace(Dropout(), torch.zeros(8, 64))
    by_module = traced.by_module
    assert sum(by_module.values()) == traced.saved_bytes
    assert by_module["first"] == 8 * 256 * 4


def test_a_large_model_is_traced_without_its_memory() -> None:
    with torch.device("meta"):
        model: Any = models.build("llama_2_7b", sequence_length=512)
        batch = torch.empty(1, 512, dtype=torch.long)
    traced = trace(model, batch, compute="bf16")
    assert traced.peak_bytes > 13e9, "its gradients alone"


class Last(nn.Module):
    """A recurrent layer over (length, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)[0]
        return outputs


def test_flops_of_a_recurrent_layer() -> None:
    """Four gates, each with a matrix for the inputs and one for the hidden state; twice as much in backward."""
    length, samples = 35, 10
    forward_flops = 2 * length * samples * 4 * 96 * (64 + 96)
    traced = trace(Last(), torch.zeros(length, samples, 64, requires_grad=True), loss=Tensor.sum)
    assert traced.flops == 3 * forward_flops


def test_a_storage_is_counted_once_with_the_bytes_it_has_now() -> None:
    grown: list[tuple[int, int]] = []

    class Counter(StorageTracker):
        def grown(self, number: int, delta_bytes: int) -> None:
            grown.append((number, delta_bytes))

    tracker, first, second = Counter(), torch.zeros(10), torch.zeros(3)
    for tensor in (first, second, first.view(2, 5), first):
        tracker.follow(tensor.untyped_storage())
    assert grown == [(0, 40), (1, 12)] and tracker.live_bytes == {0: 40, 1: 12}
    first.untyped_storage().resize_(100)
    assert tracker.follow(first.untyped_storage()) == 0
    tracker.follow(first.untyped_storage())
    assert grown[2:] == [(0, 60)] and tracker.live_bytes == {0: 100, 1: 12}
    del first, tensor
    gc.collect()
    assert grown[3:] == [(0, -100)] and tracker.live_bytes == {1: 12}
    tracker.abandon(second.untyped_storage())
    assert grown[4:] == [(1, -12)] and not tracker.live_bytes


@pytest.mark.parametrize("on_gpu", [False, True])
def test_trace_makes_the_sum_of_two_gradients_of_a_tied_matrix_a_third_tensor(on_gpu: bool) -> None:
    """At the end of backward all gradients are there, of V × D three.

    The head's is a view, whose base holds the memory too, so that it is not added to. In plain torch likewise: its
    profiler shows `aten::add` with 131,072 new bytes, then both others released.
    """
    model, tokens_BT = models.build("gpt2_tiny"), torch.zeros(1, 2, dtype=torch.long)
    matrix_bytes, parameter_bytes = 4 * 256 * 128, 4 * sum(one.numel() for one in model.parameters())
    traced = trace(model, tokens_BT, on_gpu=on_gpu)
    assert traced.peak_bytes == pytest.approx(parameter_bytes + 2 * matrix_bytes, rel=0.005)


AUTOCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "F.softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "pow": lambda x: x**2,
    "torch.pow": lambda x: torch.pow(x, 2),
    "to a power": lambda x: 2.0**x,
    "square": lambda x: x.square(),
    "rsqrt": lambda x: x.rsqrt(),
    "exp": lambda x: x.exp(),
    "log1p": torch.log1p,
    "logsumexp": lambda x: x.logsumexp(-1),
    "softplus": F.softplus,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "sum": lambda x: x.sum(-1),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
    "smoothed": lambda x: F.cross_entropy(
        x, torch.zeros(len(x), dtype=torch.long, device=x.device), label_smoothing=0.1
    ),
    "to probabilities": lambda x: F.cross_entropy(x, torch.zeros_like(x)),
    "mean": lambda x: x.mean(-1),
    "gelu": F.gelu,
    "sigmoid": lambda x: x.sigmoid(),
    "sqrt": lambda x: x.sqrt(),
    "in fp64": lambda x: x.double().exp(),
    "product": lambda x: x.float() @ x.float().T,
}


@pytest.mark.parametrize("function", AUTOCAST.values(), ids=AUTOCAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_types_under_autocast_are_those_of_cuda(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """torch's own dispatch for CUDA decides, on fake tensors: no GPU is needed for it."""

    def result_of(device: str, ways: Any) -> torch.dtype:
        with FakeTensorMode(), torch.no_grad():
            x = torch.empty(4, 6, dtype=dtype, device=device)
            before = torch.get_autocast_dtype(device)
            torch.set_autocast_enabled(device, True)  # `torch.autocast` refuses CUDA where there is no GPU
            torch.set_autocast_dtype(device, torch.bfloat16)
            try:
                with ways:
                    return function(x).dtype
            finally:
                torch.set_autocast_enabled(device, False)
                torch.set_autocast_dtype(device, before)

    assert result_of("cpu", CudaOverrides("autocast")) == result_of("cuda", nullcontext())


def test_a_gpu_s_cross_entropy_of_16_bit_logits_keeps_them_in_both_types() -> None:
    """As an H200 has shown with a script's Transformer: 16-bit and fp32 kept, one gradient in fp32 in backward; a CPU's
    keeps fp32 alone, and has two."""
    samples, classes = 256, 4096

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, classes, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), y)

    given = torch.zeros(samples, 1), torch.zeros(samples, dtype=torch.long)
    on_cpu, on_gpu = (
        trace(Classifier(), *given, compute="autocast", loss=lambda value: value, on_gpu=chosen)
        for chosen in (False, True)
    )
    logits = samples * classes
    assert on_cpu.peak_bytes == pytest.approx(3 * 4 * logits, rel=0.02)
    assert on_gpu.peak_bytes == pytest.approx((4 + 2 + 4) * logits, rel=0.02)


class Counting(StorageTracker):
    """Counts the bytes of all results."""

    held_bytes = peak_bytes = 0

    def grown(self, number: int, delta_bytes: int) -> None:
        self.held_bytes += delta_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = self.sums_in_place(func, args)
        result = func(*args, **(kwargs or {}))
        if in_place:
            self.take_over(args[0].untyped_storage(), result.untyped_storage())
        if isinstance(result, Tensor) and result.layout is torch.strided:
            self.follow(result.untyped_storage())
        return result


def read_four_times(x: Tensor) -> Tensor:
    """x · 2 and three of its four functions are kept; of four gradients of x · 2 the first is added to in place."""
    y = x * 2
    return (y.sin() + y.cos() + y.exp() + y.tanh()).sum()


def held_by_hooks(x: Tensor) -> Tensor:
    """A gradient that a hook keeps is not overwritten."""
    kept: list[Tensor] = []
    y = x * 2
    z = y.sin()
    for tensor in (y, z):
        tensor.register_hook(kept.append)  # it returns nothing, so that the gradient stays as it is
    return (z + y.cos() + y.exp()).sum()


def residual(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + (x * 0.5).tanh()
    return x.sum()


def added_by_a_formula(x: Tensor) -> Tensor:
    """The backward of `logaddexp` and `prod` makes sums of its own, which are tensors."""
    return torch.logaddexp(x, x * 2).sum() + torch.lerp(x, x * 3, x * 4).sum()


class Named(torch.autograd.Function):
    """A script's own function, which keeps something under a name that autograd uses too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = "named"
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def named(x: Tensor) -> Tensor:
    summed: Tensor = Named.apply(x).sin().sum() + x.cos().sum() + x.exp().sum()  # type: ignore[no-untyped-call]
    return summed


def updated_in_backward(x: Tensor) -> Tensor:
    """A weight decay that a hook adds to a gradient is a tensor of its own."""

    def update(weight: Tensor) -> None:
        assert weight.grad is not None
        with torch.no_grad():
            weight.sub_(weight.grad.add(weight, alpha=0.1))
        weight.grad = None

    weight = torch.rand(1024, 256, requires_grad=True)
    weight.register_post_accumulate_grad_hook(update)
    return F.linear(x, weight).sum()


def sparse(x: Tensor) -> Tensor:
    """Rows that are read twice: sparse gradients are put together, not added in place."""
    rows = torch.arange(8)
    return F.embedding(rows, x, sparse=True).sin().sum() + F.embedding(rows, x, sparse=True).cos().sum()


def test_sparse_gradients_are_no_sums_in_place() -> None:
    x = torch.rand(64, 16, requires_grad=True)
    with Counting():
        sparse(x).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and x.grad.is_sparse


@pytest.mark.parametrize(
    "function", [read_four_times, held_by_hooks, residual, added_by_a_formula, named, updated_in_backward]
)
def test_storage_tracker_has_its_peak_bytes_where_torch_sums_gradients(function: Callable[[Tensor], Tensor]) -> None:
    """The peak is that of torch's allocator without any mode, by its profiler."""
    x = torch.rand(256, 256, requires_grad=True)
    function(x).backward()  # type: ignore[no-untyped-call]
    x.grad = None
    with Counting() as counting:
        function(x).backward()  # type: ignore[no-untyped-call]
    x.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function(x).backward()  # type: ignore[no-untyped-call]
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held_bytes = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert abs(counting.peak_bytes - max(held_bytes)) < 64


FIRST_IN_A_PROCESS = """
from dlojz.config.run_config import RunConfig
from dlojz.prediction import model_trace
from dlojz.prediction.shapes import RankPart

model_trace.kept = lambda _key, make: make()
config = RunConfig.of(model="gpt_tiny", sequence_length=16, data="synthetic", pp=2, schedule="zb-h1", micro_batches=2)
traces = []
for _ in range(2):
    model_trace._kept.cache_clear()
    traces.append(model_trace.trace_of(RankPart(config), in_halves=True))
from torch.distributed.pipelining.microbatch import sum_reducer

print(len(traces[0].events) - len(traces[1].events), type(sum_reducer.init_value).__name__)
"""


def test_the_first_trace_of_a_process_is_like_the_next_and_leaves_torch_as_it_was() -> None:
    """torch's pipelining makes a tensor when it is imported: inside the trace it was 4 bytes more, and a fake tensor in
    every later pipeline of the process."""
    ended = subprocess.run([sys.executable, "-c", FIRST_IN_A_PROCESS], check=False, capture_output=True, text=True)
    assert ended.stdout == "0 Tensor\n", ended.stderr
