"""Tensors on a GPU: every Python door, streams and graphs, refusals, sizes. Skipped where there is no GPU."""

import dataclasses
import importlib
import threading

import numpy as np
import pytest

import illegal_calls
import kda
from helpers import FULL, KEEP_ALL, PACKED, PLAIN, arguments, as_bytes, to_torch
from kda import _cases, _gate_cases, reference
from kda._score import relative_error

torch = pytest.importorskip("torch")

CUDA = next(backend for backend in kda.info().backends if backend.name == "cuda")
pytestmark = [
    pytest.mark.skipif(not CUDA.available, reason=f"needs a GPU: {CUDA.detail}"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a torch that can use the GPU"),
]

# The case of the Hopper kernels, and one of the others.
HOPPER = dataclasses.replace(FULL, name="hopper", K=128, V=128, T=200, B=1)
DEVICE = torch.device("cuda", 0)
# Rounding of operands, and of the output.
TOLERANCE = 1e-2


def on_device(value):
    value = to_torch(torch, value)
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def device_call(call):
    return {name: on_device(value) for name, value in call.items()}


def host(result):
    """Return a result as it would be on the CPU: tensors moved, the rest as it is."""
    if isinstance(result, torch.Tensor):
        return result.cpu()
    return type(result)(*map(host, result)) if hasattr(result, "_fields") else result


def same_bits(actual, expected):
    return as_bytes(host(actual)) == as_bytes(host(expected))


def assert_same_results(actual, expected):
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or (a.shape == b.shape and a.dtype == b.dtype and same_bits(a, b)), name


def numbers(tensor):
    return tensor.to(torch.float64).cpu().numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strides", ["contiguous", "padded", "fused", "inner"])
@pytest.mark.parametrize("case", [FULL, PACKED, HOPPER], ids=["dense", "packed", "hopper"])
def test_results_are_right_and_on_the_device(case, dtype, strides):
    case = dataclasses.replace(case, dtype=dtype, strides=strides)
    call = device_call(arguments(case))
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert result.initial_state is call["initial_state"]
    for name, expected in reference.chunk_kda_fwd(**arguments(case)).items():
        actual = getattr(result, name)
        assert actual.device == DEVICE
        assert relative_error(numbers(actual), expected) < TOLERANCE, name


@pytest.mark.parametrize("case", [FULL, PACKED, HOPPER], ids=["dense", "packed", "hopper"])
def test_every_torch_door_has_the_same_bits(case):
    call = device_call(arguments(case))
    expected = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert_same_results(importlib.import_module("kda.torch").chunk_kda_fwd(**call, **KEEP_ALL), expected)
    compat = importlib.import_module("kda.compat")
    compat.register()
    legacy = torch.ops.npu.npu_chunk_kda_fwd(**call, **KEEP_ALL)
    for name, a, b in zip(expected._fields, legacy, expected, strict=True):
        b = b.unsqueeze(0) if name == "h" and case.cu_seqlens is not None else b
        assert a.shape == b.shape, name
        assert same_bits(a, b), name


def test_bfloat16_products_with_the_state_are_the_cpus():
    call = device_call(arguments(HOPPER))
    assert kda.supported(**call, state_products="bfloat16").state_products == "float32"
    expected = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert_same_results(kda.chunk_kda_fwd(**call, **KEEP_ALL, state_products="bfloat16"), expected)


def test_metadata_stays_on_the_host():
    call = device_call(arguments(PACKED))
    expected = kda.chunk_kda_fwd(**call)
    for bounds in (np.array(call["cu_seqlens"]), torch.tensor(call["cu_seqlens"]), tuple(call["cu_seqlens"])):
        assert_same_results(kda.chunk_kda_fwd(**(call | {"cu_seqlens": bounds})), expected)
    with pytest.raises(RuntimeError, match="^chunk_kda_fwd: cu_seqlens: expected an array on the CPU, got cuda:0"):
        kda.chunk_kda_fwd(**(call | {"cu_seqlens": torch.tensor(call["cu_seqlens"], device=DEVICE)}))


def chunk_kda_call(T=150, HV=4, seed=0, packed=False):
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)

    call = {
        "q": normal(1, T, 2, 128),
        "k": normal(1, T, 2, 128),
        "v": normal(1, T, HV, 128),
        "g": normal(1, T, HV, 128),
        "beta": normal(1, T, HV),
        "A_log": normal(HV, dtype=torch.float32),
        "dt_bias": normal(HV * 128, dtype=torch.float32),
        "initial_state": normal(3 if packed else 1, HV, 128, 128, dtype=torch.float32),
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0,
        "output_final_state": True,
    }
    return call | ({"cu_seqlens": [0, 70, 70, T]} if packed else {})


@pytest.mark.parametrize("packed", [False, True])
def test_chunk_kda_with_its_fusions(packed):
    call = chunk_kda_call(packed=packed)
    o, state, h = kda.chunk_kda(**call, return_intermediate_states=True)
    expected = reference.chunk_kda(**{name: host(value) for name, value in call.items()})
    for actual, name in ((o, "o"), (state, "final_state"), (h, "h")):
        assert actual.device == DEVICE
        assert relative_error(numbers(actual), expected[name]) < TOLERANCE, name
    door = importlib.import_module("kda.torch")
    assert same_bits(door.chunk_kda(**call)[0], o)
    compiled = torch.compile(kda.chunk_kda, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(**call)[0], o)


def test_chunk_kda_fwd_direct():
    case = dataclasses.replace(HOPPER, layout="BNSD", use_gate_in_kernel=False, dt_bias=False, H=2, HV=2)
    call = arguments(case)
    g = call["g"]
    gk = kda.kda_gate_cumsum(g, 64)
    inputs = {name: call[name] for name in ("q", "k", "v", "beta", "initial_state")}
    given = {"gk": gk, "scale": 0.1, "chunk_size": 64}
    result = kda.chunk_kda_fwd_direct(**device_call(inputs | given))
    expected = kda.chunk_kda_fwd_direct(**inputs, **given)
    for name in ("attn_out", "final_state", "Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h"):
        actual = numbers(getattr(result, name))
        assert relative_error(actual, getattr(expected, name).astype(np.float64)) < TOLERANCE, name


def test_gates():
    for case in (
        _gate_cases.GateCase("a", (50, 4, 64), dt_bias="flat"),
        _gate_cases.GateCase("b", (3, 5, 7), lower_bound=-5.0),
    ):
        call = _gate_cases.make_gate_arguments(case)
        call["output_dtype"] = "float32"
        gates = kda.fused_kda_gate(**device_call(call))
        assert gates.device == DEVICE
        np.testing.assert_allclose(
            numbers(gates),
            reference.fused_kda_gate(call["g"], call["A_log"], call["dt_bias"], call["lower_bound"]),
            3e-7,
        )
        naive = kda.naive_kda_gate(**device_call(call))
        assert naive.device == DEVICE
        assert same_bits(naive, kda.naive_kda_gate(**{name: to_torch(torch, value) for name, value in call.items()}))
    case = dataclasses.replace(FULL, layout="BNSD")
    call = device_call(arguments(case))
    shared = {name: call[name] for name in ("g", "A_log", "dt_bias", "use_gate_in_kernel", "chunk_size")}
    assert same_bits(kda.kda_gate_cumsum(**shared), kda.chunk_kda_fwd(**call, **KEEP_ALL).gk)


def test_supported():
    call = device_call(arguments(FULL))
    assert kda.supported(**call).backend == "cuda"
    answer = kda.supported(**(call | {"k": call["k"].cpu()}))
    assert not answer
    assert answer.reason == "chunk_kda_fwd: k: expected device cuda:0, got cpu"


@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_tensors_on_several_devices_are_refused(name):
    call = device_call(arguments(FULL))
    with pytest.raises(ValueError, match=f"^chunk_kda_fwd: {name}: expected device cuda:0, got cpu$"):
        kda.chunk_kda_fwd(**(call | {name: call[name].cpu()}))


def test_refusals_are_those_of_the_cpu():
    """Every illegal call that tensors can make, with the CPU's error but for the device's name."""
    tried = 0
    for illegal in illegal_calls.CHUNK_KDA_FWD:
        call = arguments(illegal.base) | illegal.changes
        try:
            tensors = {name: to_torch(torch, value) for name, value in call.items()}
            moved = {name: on_device(value) for name, value in call.items()}
        except (TypeError, ValueError):
            continue  # no such tensor
        with pytest.raises(illegal.error) as on_cpu:
            kda.chunk_kda_fwd(**tensors)
        with pytest.raises(illegal.error) as on_gpu:
            kda.chunk_kda_fwd(**moved)
        assert str(on_gpu.value) == str(on_cpu.value).replace("on cpu", "on cuda:0"), illegal.label
        tried += 1
    assert tried > 30


def test_the_callers_stream():
    call = chunk_kda_call(T=2000, HV=32)
    expected = kda.chunk_kda(**call)[0]
    gates = kda.fused_kda_gate(call["g"], call["A_log"], call["dt_bias"])
    sums = kda.kda_gate_cumsum(call["g"], 64)
    late = {name: torch.full_like(call[name], float("nan")) for name in ("q", "k", "v", "g")}
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for name, tensor in late.items():
            tensor.copy_(call[name])
        o = kda.chunk_kda(**(call | late))[0]
        late_gates = kda.fused_kda_gate(late["g"], call["A_log"], call["dt_bias"])
        late_sums = kda.kda_gate_cumsum(late["g"], 64)
        assert not stream.query(), "a call waited for the stream"
    stream.synchronize()
    for actual, wanted in ((o, expected), (late_gates, gates), (late_sums, sums)):
        assert same_bits(actual, wanted)


def test_a_captured_graph_replays_with_new_data():
    call = chunk_kda_call(packed=True)
    other = chunk_kda_call(packed=True, seed=1)
    expected = kda.chunk_kda(**other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = kda.chunk_kda(**call)
        gates = kda.fused_kda_gate(call["g"], call["A_log"], call["dt_bias"])
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            value.copy_(other[name])
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert same_bits(o, expected[0])
    assert same_bits(state, expected[1])
    assert same_bits(gates, kda.fused_kda_gate(other["g"], other["A_log"], other["dt_bias"]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cu_seqlens_on_the_device(dtype):
    call = chunk_kda_call(T=200, packed=True)
    lengths = ([0, 70, 70, 200], [0, 1, 130, 200], [0, 0, 0, 200])
    expected = [kda.chunk_kda(**(call | {"cu_seqlens": bounds})) for bounds in lengths]
    bounds = torch.tensor(lengths[0], dtype=dtype, device=DEVICE)
    on_device = call | {"cu_seqlens": bounds}
    for door in (kda, importlib.import_module("kda.torch")):
        for actual, wanted in zip(door.chunk_kda(**on_device), expected[0], strict=True):
            assert same_bits(actual, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = kda.chunk_kda(**on_device)
    for numbers, results in zip(lengths, expected, strict=True):
        bounds.copy_(torch.tensor(numbers))
        graph.replay()
        torch.cuda.synchronize()
        for actual, wanted in zip(made, results, strict=True):
            assert same_bits(actual, wanted)


def test_cu_seqlens_on_the_device_and_h():
    call = chunk_kda_call(T=200, packed=True)
    bounds = call["cu_seqlens"]
    on_device = call | {"cu_seqlens": torch.tensor(bounds, device=DEVICE), "return_intermediate_states": True}
    with pytest.raises(ValueError, match="^chunk_kda: return_intermediate_states: expected False, or cu_seqlens_cpu"):
        kda.chunk_kda(**on_device)
    h = kda.chunk_kda(**on_device, cu_seqlens_cpu=torch.tensor(bounds))[2]
    assert same_bits(h, kda.chunk_kda(**call, return_intermediate_states=True)[2])
    with pytest.raises(ValueError, match="^chunk_kda: cu_seqlens: expected device cpu, got cuda:0"):
        kda.chunk_kda(**{name: host(value) for name, value in call.items()} | {"cu_seqlens": on_device["cu_seqlens"]})


def test_several_threads_and_streams_at_once():
    calls = [chunk_kda_call(T=300 + 50 * i, seed=i, packed=i % 2 == 1) for i in range(6)]
    expected = [kda.chunk_kda(**call) for call in calls]
    torch.cuda.synchronize()
    wrong = []

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            for _ in range(20):
                made = kda.chunk_kda(**calls[index])
            torch.cuda.current_stream().synchronize()
        if not all(same_bits(a, b) for a, b in zip(made, expected[index], strict=True)):
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_comes_from_torch_and_goes_back():
    call = chunk_kda_call(T=1000)
    kda.chunk_kda(**call)
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(DEVICE), torch.cuda.mem_get_info(DEVICE)[0]
    for _ in range(5):
        kda.chunk_kda(**call)
    assert torch.cuda.memory_allocated(DEVICE) == before
    assert torch.cuda.mem_get_info(DEVICE)[0] == free


def test_other_devices_stay_current():
    before = torch.cuda.current_device()
    kda.chunk_kda(**chunk_kda_call())
    assert torch.cuda.current_device() == before


def test_cupy():
    cupy = pytest.importorskip("cupy")
    case = dataclasses.replace(FULL, dtype="float16")
    expected = kda.chunk_kda_fwd(**device_call(arguments(case)), **KEEP_ALL)
    given = {
        name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in arguments(case).items()
    }
    with cupy.cuda.Stream(non_blocking=True):
        call = {name: value + 0 if isinstance(value, cupy.ndarray) else value for name, value in given.items()}
        result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
        gates = kda.fused_kda_gate(call["g"], call["A_log"], call["dt_bias"])
    assert result.initial_state is call["initial_state"]
    for name in result._fields:
        array = getattr(result, name)
        assert isinstance(array, cupy.ndarray), name
        assert array.get().tobytes() == as_bytes(host(getattr(expected, name))), name
    assert isinstance(gates, cupy.ndarray)
    naive = kda.naive_kda_gate(call["g"], call["A_log"], call["dt_bias"])
    np.testing.assert_allclose(gates.get(), naive.get(), 3e-7)


def test_jax(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    devices = [device for device in jax.devices() if device.platform in ("gpu", "cuda")]
    if not devices:
        pytest.skip("a jax that cannot use the GPU")
    expected = kda.chunk_kda_fwd(**device_call(arguments(FULL)), **KEEP_ALL)
    call = {
        name: jax.device_put(value, devices[0]) * 1 if isinstance(value, np.ndarray) else value
        for name, value in arguments(FULL).items()
    }
    for _ in range(3):
        result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
        for name in result._fields:
            array = getattr(result, name)
            assert isinstance(array, jax.Array), name
            assert array.devices() == {devices[0]}, name
            assert as_bytes(array) == as_bytes(host(getattr(expected, name))), name


def test_fla():
    pytest.importorskip("fla.ops.kda", reason="needs flash-linear-attention")
    fla = importlib.import_module("fla.ops.kda")
    integration = importlib.import_module("kda.integrations.fla")
    call = chunk_kda_call() | {"safe_gate": True}
    expected = kda.chunk_kda(**call)
    integration.register()
    try:
        with torch.no_grad():
            o, state = fla.chunk_kda(**call)
    finally:
        integration.unregister()
    assert same_bits(o, expected[0])
    assert same_bits(state, expected[1])


def kda_command(*args):
    typer = pytest.importorskip("typer.testing")
    return typer.CliRunner().invoke(importlib.import_module("kda.cli.app").app, [str(arg) for arg in args])


def test_the_command_line(tmp_path):
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    files = pytest.importorskip("safetensors.numpy")
    call = arguments(dataclasses.replace(HOPPER, dtype="float16"))
    arrays = {name: value for name, value in call.items() if isinstance(value, np.ndarray)}
    files.save_file(arrays, source, {"use_gate_in_kernel": "true"})
    result = kda_command("run", source, "-o", output, "--backend", "cuda", "--check")
    assert result.exit_code == 0, result.output
    assert "backend cuda" in result.stdout
    expected = kda.chunk_kda_fwd(**device_call(call), **KEEP_ALL)
    for name, array in files.load_file(output).items():
        assert array.tobytes() == as_bytes(host(getattr(expected, name))), name
    files.save_file(arrays | {"g": arrays["g"].astype(np.float64)}, tmp_path / "wide.safetensors")
    wide = kda_command("run", tmp_path / "wide.safetensors", "-o", output, "--backend", "cuda")
    assert wide.exit_code == 2
    assert "g: expected dtype float32 or bfloat16, got float64" in wide.stderr
    missing = kda_command("run", source, "-o", output, "--backend", "cuda:77")
    assert missing.exit_code == 2
    assert missing.stderr.count("\n") == 1
    result = kda_command(
        "verify", "--backend", "cuda", "--filter", "tail_T6", "--filter", "*_short", "--filter", "T1_H4_*"
    )
    assert result.exit_code == 0, result.output
    report = tmp_path / "bench.json"
    small = ("--tokens", "64", "--heads", "4", "--rounds", "1", "--json", report)
    result = kda_command("bench", "--backend", "cuda", *small)
    assert result.exit_code == 0, result.output
    assert '"backend": "cuda: ' in report.read_text()
    assert kda_command("bench", "--backend", "cuda", *small, "--plot", tmp_path / "x.png").exit_code == 2
    assert "found" in kda_command("info").stdout


def free_bytes():
    return torch.cuda.mem_get_info(DEVICE)[0] if torch.cuda.is_available() else 0


@pytest.mark.skipif(free_bytes() < 60e9, reason="needs 60 GB of a GPU's memory")
@pytest.mark.parametrize(("B", "T"), [(2050, 256), (1, 524_800)], ids=["many sequences", "one sequence"])
def test_more_than_two_to_the_31_elements(B, T):
    """The last sequence, or the part after a chunk boundary, has the bits that it has alone."""
    H = 32
    assert B * T * H * 128 > 2**31
    generator = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape):
        return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(generator=generator)

    call = {name: normal(B, T, H, 128) for name in ("q", "k", "v", "g")} | {"beta": normal(B, T, H)}
    flags = {
        "A_log": torch.zeros(H, device=DEVICE),
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0,
        "output_final_state": True,
    }
    o, state = kda.chunk_kda(**call, **flags)
    if B > 1:
        alone = {name: tensor[-1:].clone() for name, tensor in call.items()}
        last, last_state = kda.chunk_kda(**alone, **flags)
        assert torch.equal(o[-1:], last)
        assert torch.equal(state[-1:], last_state)
        return
    cut = T - 640
    _, middle = kda.chunk_kda(**{name: tensor[:, :cut] for name, tensor in call.items()}, **flags)
    rest = {name: tensor[:, cut:] for name, tensor in call.items()}
    last, last_state = kda.chunk_kda(**rest, **flags, initial_state=middle)
    assert torch.equal(o[:, cut:], last)
    assert torch.equal(state, last_state)


@pytest.mark.skipif(free_bytes() < 60e9, reason="needs 60 GB of a GPU's memory")
def test_gates_of_more_than_two_to_the_31_elements():
    T, H, D = 1_050_000, 16, 128
    g = torch.empty(T, H, D, device=DEVICE, dtype=torch.bfloat16).normal_()
    A_log = torch.linspace(-0.5, 0.5, H, device=DEVICE)
    gates = kda.fused_kda_gate(g, A_log, output_dtype=torch.bfloat16)
    assert torch.equal(gates[-100:], kda.fused_kda_gate(g[-100:].clone(), A_log, output_dtype=torch.bfloat16))
    sums = kda.kda_gate_cumsum(g.view(1, 1, T * H, D), 64)
    assert torch.equal(sums[:, :, -64:], kda.kda_gate_cumsum(g.view(1, 1, T * H, D)[:, :, -64:].clone(), 64))


def test_nothing_to_do():
    for case in (dataclasses.replace(FULL, T=0), dataclasses.replace(FULL, B=0)):
        result = kda.chunk_kda_fwd(**device_call(arguments(case)), **KEEP_ALL)
        assert result.attn_out.device == DEVICE
        assert result.attn_out.numel() == 0
    plain = kda.chunk_kda_fwd(**device_call(arguments(PLAIN)))
    assert plain.attn_out.device == DEVICE
    assert _cases.default_path().exists()
