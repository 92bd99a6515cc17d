"""torch.ops.kda: schemas, results, shapes for tracing, gradients, registration."""

import dataclasses
import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kda
from helpers import FULL, KEEP_ALL, PACKED, arguments, as_bytes, assert_same_bits, to_torch
from kda import _cases

torch = pytest.importorskip("torch")
import kda.torch  # noqa: E402

NAMES = ("attn_out", "final_state", "gk", "Aqk", "Akk", "w", "u", "qg", "kg", "v_new", "h")
OPERATORS = ("chunk_kda_fwd", "chunk_kda", "chunk_kda_fwd_direct", "fused_kda_gate", "kda_gate_cumsum")
NTD = dataclasses.replace(PACKED, name="ntd", layout="NTD", state_v_first=True, dtype="float16")
CALLS = [FULL, PACKED, NTD, dataclasses.replace(FULL, name="nothing", T=0)]


def tensor_call(case=FULL, **changes):
    """Return the arguments of torch.ops.kda.chunk_kda_fwd."""
    call = {name: to_torch(torch, value) for name, value in arguments(case).items()} | changes
    for name in ("cu_seqlens", "chunk_indices"):
        if isinstance(call[name], list):
            call[name] = torch.tensor(call[name])
    return call


def fla_call(**changes):
    """Return the arguments of torch.ops.kda.chunk_kda: packed sequences, everything made inside."""
    call = tensor_call(PACKED)
    for name in ("layout", "chunk_indices", "safe_gate"):
        del call[name]
    flags = ("output_final_state", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    return call | dict.fromkeys(flags, True) | {"return_intermediate_states": True, "lower_bound": -3.0} | changes


def direct_call():
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(shape, generator=generator)

    q, k = uniform(2, 2, 70, 128).half() * 0.1, uniform(2, 2, 70, 128).half() * 0.1
    gk = kda.kda_gate_cumsum(-uniform(2, 4, 70, 128), 64)
    return (q, k, uniform(2, 4, 70, 256).half(), gk, uniform(2, 4, 70), 0.1, 64), {
        "initial_state": uniform(2, 4, 128, 256)
    }


def gate_arguments():
    g = torch.linspace(-9, 9, 2 * 5 * 3 * 8).reshape(2, 5, 3, 8).bfloat16()
    return g, torch.zeros(3), torch.linspace(-1, 1, 24)


SAMPLES = {
    "chunk_kda_fwd": [((), tensor_call(case) | KEEP_ALL) for case in CALLS]
    + [((), tensor_call()), ((), tensor_call() | {"state_products": "bfloat16"})],
    "chunk_kda": [((), fla_call()), ((), fla_call(cu_seqlens=None, initial_state=None, state_products="bfloat16"))],
    "chunk_kda_fwd_direct": [direct_call()],
    "fused_kda_gate": [(gate_arguments(), {}), ((*gate_arguments(), torch.float16, -2.5), {})],
    "kda_gate_cumsum": [
        ((torch.rand(1, 2, 70, 16), 32), {}),
        ((torch.rand(2, 70, 16), 64), {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}),
        ((torch.rand(1, 2, 70, 16), 64), {"cu_seqlens": torch.tensor([0, 65, 65, 70])}),
    ],
}
EVERY_SAMPLE = [(name, args, kwargs) for name, calls in SAMPLES.items() for args, kwargs in calls]


def overload(name):
    return getattr(torch.ops.kda, name).default


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def positional(name, args, kwargs):
    """Split keyword arguments as the schema does: opcheck wants them so."""
    order = [a.name for a in overload(name)._schema.arguments if not a.kwarg_only][len(args) :]
    given = list(args)
    kwargs = dict(kwargs)
    for argument in order:
        if argument not in kwargs:
            break
        given.append(kwargs.pop(argument))
    return tuple(given), kwargs


@pytest.mark.parametrize("name", OPERATORS)
def test_schema_has_the_arguments_of_the_function(name):
    schema = overload(name)._schema
    parameters = {
        parameter: value.default
        for parameter, value in inspect.signature(getattr(kda, name)).parameters.items()
        if parameter not in ("cp_context", "kwargs")
    }
    assert [argument.name for argument in schema.arguments] == list(parameters)
    for argument in schema.arguments:
        default = parameters[argument.name]
        if default is inspect.Parameter.empty:
            assert not argument.has_default_value()
        elif argument.name != "output_dtype":
            assert argument.default_value == default
    assert not any(argument.alias_info for argument in schema.arguments)


def test_chunk_kda_fwd_returns_eleven_tensors():
    schema = overload("chunk_kda_fwd")._schema
    assert tuple(result.name for result in schema.returns) == NAMES
    assert {str(result.type) for result in schema.returns} == {"Tensor"}


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.name)
@pytest.mark.parametrize("flags", [{}, KEEP_ALL, {"return_intermediate_states": True}], ids=["few", "all", "h"])
def test_chunk_kda_fwd_has_the_bits_of_the_function(case, flags):
    call = tensor_call(case)
    expected = kda.chunk_kda_fwd(**call, **flags)
    results = torch.ops.kda.chunk_kda_fwd(**call, **flags)
    assert len(results) == 11
    for name, result, wanted in zip(NAMES, results, expected[:-1], strict=True):
        assert type(result) is torch.Tensor
        if wanted is None:
            assert result.shape == (0,), name
            assert result.dtype == (torch.float32 if name in ("final_state", "gk") else call["q"].dtype), name
        else:
            assert result.dtype == wanted.dtype
            assert as_bytes(result) == as_bytes(wanted), name
            assert result.shape == wanted.shape
    wrapped = kda.torch.chunk_kda_fwd(**call, **flags)
    assert_same_bits(wrapped, expected)
    assert wrapped.initial_state is call["initial_state"]


def test_wrapper_takes_lists_and_arrays_for_metadata():
    call = tensor_call(PACKED)
    expected = kda.chunk_kda_fwd(**call)
    for cu_seqlens in ([0, 65, 65, 70], (0, 65, 65, 70), np.array([0, 65, 65, 70], np.int32)):
        pairs = [[0, 0], [0, 1], [2, 0]]
        assert_same_bits(
            kda.torch.chunk_kda_fwd(**(call | {"cu_seqlens": cu_seqlens, "chunk_indices": pairs})), expected
        )
    for wrong, error in (([], ValueError), ([0, 70.0], TypeError), ([0, 69], ValueError)):
        with pytest.raises(error, match="chunk_kda_fwd: cu_seqlens: expected"):
            kda.torch.chunk_kda_fwd(**(call | {"cu_seqlens": wrong}))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_metadata_of_either_width(dtype):
    call = tensor_call(PACKED)
    expected = torch.ops.kda.chunk_kda_fwd(**call)
    call |= {"cu_seqlens": call["cu_seqlens"].to(dtype), "chunk_indices": torch.tensor([0, 0, 0, 1, 2, 0], dtype=dtype)}
    for a, b in zip(torch.ops.kda.chunk_kda_fwd(**call), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strides", ["padded", "fused", "inner"])
def test_strided_inputs(dtype, strides):
    case = dataclasses.replace(FULL, dtype=dtype, strides=strides)
    expected = torch.ops.kda.chunk_kda_fwd(**tensor_call(dataclasses.replace(case, strides="contiguous")), **KEEP_ALL)
    call = tensor_call(case)
    assert not call["q"].is_contiguous()
    for a, b in zip(torch.ops.kda.chunk_kda_fwd(**call, **KEEP_ALL), expected, strict=True):
        assert as_bytes(a) == as_bytes(b)


def test_chunk_kda_has_the_bits_of_the_function():
    call = fla_call()
    o, final_state, h = kda.chunk_kda(**call)
    assert h.shape == (1, 3, 4, 32, 48)
    for function in (torch.ops.kda.chunk_kda, kda.torch.chunk_kda):
        for actual, expected in zip(function(**call), (o, final_state, h), strict=True):
            assert torch.equal(actual, expected)
    few = fla_call(return_intermediate_states=False, output_final_state=False)
    results = torch.ops.kda.chunk_kda(**few)
    assert torch.equal(results[0], o)
    assert [tuple(result.shape) for result in results[1:]] == [(0,), (0,)]
    assert [result.dtype for result in results[1:]] == [torch.float32, torch.bfloat16]
    assert kda.torch.chunk_kda(**few)[1:] == (None,)


@pytest.mark.parametrize("name", OPERATORS)
def test_functions_have_the_arguments_of_those_of_kda(name):
    wanted, found = (inspect.signature(getattr(package, name)).parameters.values() for package in (kda, kda.torch))
    assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in wanted]
    assert [p.default for p in found if p.name != "output_dtype"] == [
        p.default for p in wanted if p.name != "output_dtype"
    ]


def test_arguments_of_fla_that_are_not_ours():
    state = fla_call()["initial_state"].transpose(-1, -2).contiguous()
    call = fla_call(initial_state=state, cp_context=None, use_graph=False)
    del call["state_v_first"]
    with pytest.warns(DeprecationWarning, match="state_v_first") as caught:
        result = kda.torch.chunk_kda(**call, transpose_state_layout=True)
    assert caught[0].filename == __file__
    assert torch.equal(result[1], kda.torch.chunk_kda(**call, state_v_first=True)[1])
    for name, value, error in (("cp_context", 1, ValueError), ("use_graph", True, ValueError), ("other", 1, TypeError)):
        with pytest.raises(error, match=f"chunk_kda: {name}: expected"):
            kda.torch.chunk_kda(**(call | {name: value}))


def test_chunk_kda_fwd_direct_has_the_bits_of_the_function():
    args, kwargs = direct_call()
    expected = kda.chunk_kda_fwd_direct(*args, **kwargs)
    actual = kda.torch.chunk_kda_fwd_direct(*args, **kwargs)
    assert_same_bits(actual, expected)
    assert actual.gk is args[3]
    assert actual.initial_state is kwargs["initial_state"]
    stateless = kda.torch.chunk_kda_fwd_direct(*args, output_final_state=False)
    assert stateless.final_state is stateless.initial_state is None
    assert len(torch.ops.kda.chunk_kda_fwd_direct(*args)) == 10


def test_gates_have_the_bits_of_the_functions():
    g, a_log, dt_bias = gate_arguments()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bound in (None, -2.5):
            expected = kda.fused_kda_gate(g, a_log, dt_bias, dtype, bound)
            assert torch.equal(torch.ops.kda.fused_kda_gate(g, a_log, dt_bias, dtype, bound), expected)
            assert torch.equal(kda.torch.fused_kda_gate(g, a_log, dt_bias, dtype, bound), expected)
    assert torch.ops.kda.fused_kda_gate(g, a_log).dtype == torch.float32
    gates, cu_seqlens = torch.rand(1, 2, 70, 16), [0, 65, 65, 70]
    expected = kda.kda_gate_cumsum(gates, 64, cu_seqlens=cu_seqlens)
    assert torch.equal(torch.ops.kda.kda_gate_cumsum(gates, 64, cu_seqlens=torch.tensor(cu_seqlens)), expected)
    assert torch.equal(kda.torch.kda_gate_cumsum(gates, 64, cu_seqlens=cu_seqlens), expected)


def test_errors_are_those_of_the_functions():
    with pytest.raises(ValueError, match="^chunk_kda_fwd: chunk_size: expected 64 or 128, got 32"):
        torch.ops.kda.chunk_kda_fwd(**tensor_call(chunk_size=32))
    with pytest.raises(ValueError, match="^chunk_kda_fwd: state_products: expected float32 or bfloat16, got half"):
        torch.ops.kda.chunk_kda_fwd(**tensor_call(state_products="half"))
    with pytest.raises(TypeError, match="^chunk_kda_fwd: g: expected dtype float32 or bfloat16, got float16"):
        torch.ops.kda.chunk_kda_fwd(**tensor_call(g=tensor_call()["g"].half()))
    with pytest.raises(ValueError, match="^chunk_kda: allow_neg_eigval: "):
        torch.ops.kda.chunk_kda(**fla_call(use_beta_sigmoid_in_kernel=False))


def small_cases():
    cases = [case for case in _cases.load(_cases.default_path()) if case.T * case.HV * (case.K + case.V) < 2**20]
    return [case for case in cases if case.strides != "reversed"][::9]


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_fake_outputs_look_like_real_ones(case):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    call = tensor_call(case, **case.keep_flags)
    real = torch.ops.kda.chunk_kda_fwd(**call)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        given = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        fake = torch.ops.kda.chunk_kda_fwd(**given)
    for name, a, b in zip(NAMES, fake, real, strict=True):
        assert (a.dtype, a.device, a.dim()) == (b.dtype, b.device, b.dim()), name
        packed_h = name == "h" and case.cu_seqlens is not None and b.shape != (0,)
        start = 1 if packed_h else 0
        assert a.shape[start:] == b.shape[start:], name
        if packed_h:
            assert not isinstance(a.shape[0], int), "the number of chunks depends on the values of cu_seqlens"
        else:
            assert a.stride() == b.stride(), name


@pytest.mark.parametrize(("name", "args", "kwargs"), EVERY_SAMPLE)
def test_meta_outputs_look_like_real_ones(name, args, kwargs):
    if isinstance(kwargs.get("cu_seqlens"), torch.Tensor) and name != "kda_gate_cumsum":
        pytest.skip("the number of chunks depends on the values of cu_seqlens")

    def to_meta(value):
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    real = as_tuple(overload(name)(*args, **kwargs))
    meta = as_tuple(overload(name)(*map(to_meta, args), **{key: to_meta(value) for key, value in kwargs.items()}))
    assert [(x.shape, x.dtype, x.stride()) for x in meta] == [(x.shape, x.dtype, x.stride()) for x in real]
    assert {x.device.type for x in meta} == {"meta"}


def test_illegal_calls_are_refused_when_traced():
    def meta_call(**changes):
        call = tensor_call(**changes)
        return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}

    with pytest.raises(ValueError, match="^chunk_kda_fwd: layout: expected BSND, BNSD, TND or NTD, got XYZ"):
        torch.ops.kda.chunk_kda_fwd(**meta_call(layout="XYZ"))
    with pytest.raises(ValueError, match="^chunk_kda_fwd: q: expected rank 3 for layout TND, got rank 4"):
        torch.ops.kda.chunk_kda_fwd(**meta_call(layout="TND"))


@pytest.mark.parametrize(("name", "args", "kwargs"), EVERY_SAMPLE)
def test_opcheck(name, args, kwargs):
    args, kwargs = positional(name, args, kwargs)
    torch.library.opcheck(overload(name), args, kwargs)


def test_opcheck_of_strided_inputs():
    args, kwargs = positional("chunk_kda_fwd", (), tensor_call(dataclasses.replace(FULL, strides="fused")) | KEEP_ALL)
    torch.library.opcheck(overload("chunk_kda_fwd"), args, kwargs)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_gradients_are_refused_while_grad_mode_is_on(name):
    call = tensor_call()
    expected = torch.ops.kda.chunk_kda_fwd(**call)
    wanting = call | {name: call[name].clone().requires_grad_()}
    message = f"^chunk_kda_fwd: {name}: expected .*no_grad.*, got one that requires grad"
    with pytest.raises(ValueError, match=message):
        torch.ops.kda.chunk_kda_fwd(**wanting)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            results = torch.ops.kda.chunk_kda_fwd(**wanting)
        assert not any(result.requires_grad for result in results)
        assert all(as_bytes(a) == as_bytes(b) for a, b in zip(results, expected, strict=True))


def test_gradients_are_refused_by_every_operator():
    args, kwargs = direct_call()
    args[3].requires_grad_()
    g, weights = gate_arguments()[0], torch.zeros(3, requires_grad=True)
    ops = torch.ops.kda
    refused = [
        (ops.chunk_kda, "chunk_kda: v", (), fla_call(v=fla_call()["v"].requires_grad_())),
        (ops.chunk_kda_fwd_direct, "chunk_kda_fwd_direct: gk", args, kwargs),
        (ops.fused_kda_gate, "fused_kda_gate: A_log", (g, weights), {}),
        (ops.kda_gate_cumsum, "kda_gate_cumsum: g", (torch.rand(2, 70, 16, requires_grad=True), 64), {}),
    ]
    for operator, start, given, named in refused:
        with pytest.raises(ValueError, match=f"^{start}: expected .*, got one that requires grad"):
            operator(*given, **named)
        with torch.no_grad():
            operator(*given, **named)


def test_meta_tensors_that_want_gradients_are_refused_too():
    g = torch.rand(2, 70, 16, device="meta", requires_grad=True)
    with pytest.raises(ValueError, match="^kda_gate_cumsum: g: expected .*, got one that requires grad"):
        torch.ops.kda.kda_gate_cumsum(g, 64)


def test_inside_an_autograd_function():
    call = tensor_call()

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            results = torch.ops.kda.chunk_kda_fwd(**(call | {"q": q}), **KEEP_ALL)
            ctx.save_for_backward(*results)
            return results[0]

        @staticmethod
        def backward(ctx, gradient):
            return 2 * torch.ones_like(gradient)[..., :1].sum() * torch.ones_like(call["q"])

    q = call["q"].clone().requires_grad_()
    out = Operator.apply(q)
    assert as_bytes(out.detach()) == as_bytes(torch.ops.kda.chunk_kda_fwd(**call)[0])
    out.sum().backward()
    assert q.grad is not None


def test_inference_tensors():
    with torch.inference_mode():
        call = tensor_call()
        call["q"] = call["q"] * 1
        assert call["q"].is_inference()
        results = torch.ops.kda.chunk_kda_fwd(**call, **KEEP_ALL)
    for a, b in zip(results, torch.ops.kda.chunk_kda_fwd(**call, **KEEP_ALL), strict=True):
        assert as_bytes(a) == as_bytes(b)


def test_inputs_are_not_written():
    call = tensor_call()
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    torch.ops.kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert all(torch.equal(call[name], x) for name, x in before.items())
    assert all(call[name]._version == 0 for name in before)


def test_threads():
    calls = [tensor_call(dataclasses.replace(PACKED, seed=seed)) for seed in range(4)]
    expected = [torch.ops.kda.chunk_kda_fwd(**call, **KEEP_ALL) for call in calls]
    barrier = threading.Barrier(4)

    def work(index):
        barrier.wait()
        with torch.no_grad():
            return [torch.ops.kda.chunk_kda_fwd(**calls[index], **KEEP_ALL) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for index, runs in enumerate(pool.map(work, range(4))):
            for results in runs:
                assert all(as_bytes(a) == as_bytes(b) for a, b in zip(results, expected[index], strict=True))


def printed_by(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_kda_registers_nothing():
    code = "import sys, kda; print('torch' in sys.modules, 'kda.torch' in sys.modules)"
    assert printed_by(code) == ["False", "False"]


@pytest.mark.parametrize("first", ["import torch, kda", "import kda, torch"])
def test_the_first_tensor_registers(first):
    code = (
        f"{first}\n"
        "print(hasattr(torch.ops.kda, 'chunk_kda_fwd'))\n"
        "kda.kda_gate_cumsum(torch.zeros(1, 2, 3), 64)\n"
        "print(hasattr(torch.ops.kda, 'chunk_kda_fwd'))\n"
        "import kda.torch\n"
        "kda.kda_gate_cumsum(torch.zeros(1, 2, 3), 64)\n"
        "print(tuple(torch.ops.kda.kda_gate_cumsum(torch.zeros(1, 2, 3), 64).shape) == (1, 2, 3))"
    )
    assert printed_by(code) == ["False", "True", "True"]


def test_a_second_copy_of_the_package_registers_nothing():
    code = (
        "import sys, torch, kda.torch\n"
        "first = kda.torch._ops\n"
        "for name in [name for name in sys.modules if name.startswith('kda.torch')]: del sys.modules[name]\n"
        "del kda.torch\n"
        "import kda.torch\n"
        "print(first is not kda.torch._ops, tuple(torch.ops.kda.kda_gate_cumsum(torch.zeros(1, 2, 3), 64).shape))"
    )
    assert printed_by(code)[0] == "True"


def test_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, kda\n"
        "print(kda.kda_gate_cumsum(np.zeros((1, 2, 3), 'f4'), 64).shape == (1, 2, 3))\n"
        "try: import kda.torch\n"
        "except ImportError: print('refused')\n"
        "import kda.compat\n"
        "try: kda.compat.register()\n"
        "except ImportError: print('refused')"
    )
    assert printed_by(code) == ["True", "refused", "refused"]


def test_old_torch_is_refused_by_name_and_harmless_otherwise():
    code = (
        "import sys, torch, kda\n"
        "del torch.library.register_fake\n"
        "kda.kda_gate_cumsum(torch.zeros(1, 2, 3), 64)\n"
        "print('kda.torch' in sys.modules)\n"
        "try: import kda.torch\n"
        "except ImportError as error: print(str(error).replace(' ', '_'))"
    )
    loaded, message = printed_by(code)
    assert loaded == "False"
    assert message.startswith("kda.torch:_expected_torch_2.4_or_later,_got_")
