"""torch.compile and torch.export of the torch operators, without a break in the graph."""

import dataclasses
import subprocess
import sys

import pytest

import kda
from helpers import FULL, KEEP_ALL, PACKED, arguments, as_bytes, assert_same_bits, to_torch

torch = pytest.importorskip("torch")
import kda.torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensor_call(case=FULL, **changes):
    call = {name: to_torch(torch, value) for name, value in arguments(case).items()} | changes
    if isinstance(call["cu_seqlens"], list):
        call["cu_seqlens"] = torch.tensor(call["cu_seqlens"])
    return call


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("flags", [{}, KEEP_ALL, {"return_intermediate_states": True}], ids=["few", "all", "h"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_chunk_kda_fwd(case, flags, mode):
    call = tensor_call(case)
    expected = kda.chunk_kda_fwd(**call, **flags)
    function = compiled(lambda **arguments: kda.torch.chunk_kda_fwd(**arguments))
    with mode():
        result = function(**call, **flags)
    assert_same_bits(result, expected)
    assert as_bytes(result.initial_state) == as_bytes(expected.initial_state)


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_inside_other_operations(case):
    """The default backend, with work before and after, and h of unknown length used."""
    call = tensor_call(case)

    def function(q, v, **others):
        results = torch.ops.kda.chunk_kda_fwd(q * 2, v=v + 1, **others, return_intermediate_states=True)
        return results[0] * 3, results[10].float().sum(dim=-1)

    with torch.no_grad():
        expected = function(**call)
        actual = compiled(function, backend="inductor")(**call)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b)


def test_dynamic_sizes_compile_once():
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    function = torch.compile(
        lambda **arguments: kda.torch.chunk_kda_fwd(**arguments, **KEEP_ALL),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for T, bounds in ((150, (0, 70, 70, 150)), (70, (0, 1, 30, 70)), (133, (0, 64, 128, 133))):
        call = tensor_call(dataclasses.replace(PACKED, T=T, cu_seqlens=bounds))
        assert_same_bits(function(**call), kda.chunk_kda_fwd(**call, **KEEP_ALL))
    assert len(compilations) == 1


def test_dynamic_dense_sizes_compile_once():
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    function = torch.compile(
        lambda **arguments: kda.torch.chunk_kda_fwd(**arguments, **KEEP_ALL),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for T, B in ((70, 3), (150, 5), (64, 7)):
        call = tensor_call(dataclasses.replace(FULL, T=T, B=B))
        assert_same_bits(function(**call), kda.chunk_kda_fwd(**call, **KEEP_ALL))
    assert len(compilations) == 1


def test_lists_of_metadata():
    call = tensor_call(PACKED) | {"cu_seqlens": [0, 65, 65, 70], "chunk_indices": [0, 0, 0, 1, 2, 0]}
    function = compiled(lambda **arguments: kda.torch.chunk_kda_fwd(**arguments))
    assert_same_bits(function(**call), kda.chunk_kda_fwd(**call))


def test_chunk_kda():
    call = tensor_call(PACKED, lower_bound=-3.0, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for name in ("layout", "chunk_indices", "safe_gate"):
        del call[name]
    function = compiled(lambda **arguments: kda.torch.chunk_kda(**arguments))
    for flags in ({}, {"return_intermediate_states": True}):
        results, expected = function(**call, **flags), kda.chunk_kda(**call, **flags)
        assert len(results) == len(expected) == 2 + len(flags)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_gates():
    g, a_log = torch.linspace(-9, 9, 240).reshape(2, 5, 3, 8), torch.zeros(3)
    function = compiled(lambda g: kda.torch.fused_kda_gate(g + 1, a_log, output_dtype=torch.bfloat16))
    assert torch.equal(function(g), kda.fused_kda_gate(g + 1, a_log, None, torch.bfloat16))
    function = compiled(lambda g, cu: kda.torch.kda_gate_cumsum(-g, 32, cu_seqlens=cu) * 2)
    gates, cu = torch.rand(1, 2, 70, 16), torch.tensor([0, 33, 70])
    assert torch.equal(function(gates, cu), kda.kda_gate_cumsum(-gates, 32, cu_seqlens=cu) * 2)


def test_direct():
    q, v = 0.1 * torch.rand(1, 2, 70, 128).half(), torch.rand(1, 2, 70, 256).half()
    gk, beta, state = (
        kda.kda_gate_cumsum(-torch.rand(1, 2, 70, 128), 64),
        torch.rand(1, 2, 70),
        torch.rand(1, 2, 128, 256),
    )
    call = (q, q, v, gk, beta, 0.1, 64)
    function = compiled(lambda *arguments: kda.torch.chunk_kda_fwd_direct(*arguments, initial_state=state))
    assert_same_bits(function(*call), kda.chunk_kda_fwd_direct(*call, initial_state=state))


def test_gradients_are_refused():
    call = tensor_call()
    call["q"].requires_grad_()
    function = compiled(lambda **arguments: torch.ops.kda.chunk_kda_fwd(**arguments)[0])
    with pytest.raises(Exception, match="chunk_kda_fwd: q: expected .*no_grad.*, got one that requires grad"):
        function(**call)
    torch._dynamo.reset()
    with torch.no_grad():
        assert as_bytes(function(**call)) == as_bytes(torch.ops.kda.chunk_kda_fwd(**call)[0])


def test_inside_an_autograd_function():
    call = tensor_call()
    others = {name: value for name, value in call.items() if name != "q"}

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            out, final_state, *_ = torch.ops.kda.chunk_kda_fwd(q, **others, output_final_state=True)
            ctx.save_for_backward(q, final_state)
            return out

        @staticmethod
        def backward(ctx, gradient):
            q, final_state = ctx.saved_tensors
            return q * gradient.float().sum() + final_state.sum()

    def grad_of(function):
        q = call["q"].clone().requires_grad_()
        out = function(q)
        out.float().sum().backward()
        return out.detach(), q.grad

    eager = grad_of(Operator.apply)
    graph = grad_of(compiled(lambda q: Operator.apply(q)))
    assert as_bytes(graph[0]) == as_bytes(eager[0])
    torch.testing.assert_close(graph[1], eager[1])


def test_the_functions_of_kda():
    call = tensor_call(PACKED)
    assert_same_bits(compiled(lambda **arguments: kda.chunk_kda_fwd(**arguments))(**call), kda.chunk_kda_fwd(**call))
    plain = {name: call[name] for name in ("q", "k", "v", "beta")} | {"g": -call["g"].abs()}
    o, _ = compiled(lambda **arguments: kda.chunk_kda(**arguments, cp_context=None, transpose_state_layout=True))(
        **plain
    )
    assert torch.equal(o, kda.chunk_kda(**plain)[0])
    g, a_log = torch.linspace(-9, 9, 240).reshape(2, 5, 3, 8), torch.zeros(3)
    assert torch.equal(compiled(lambda g: kda.fused_kda_gate(g, a_log))(g), kda.fused_kda_gate(g, a_log))
    assert torch.equal(compiled(lambda g: kda.kda_gate_cumsum(-g, 32))(g), kda.kda_gate_cumsum(-g, 32))


def test_the_functions_of_kda_before_any_tensor_came():
    code = (
        "import torch, kda\n"
        "def function(g): return kda.kda_gate_cumsum(g * 2, 64)\n"
        "g = -torch.ones(1, 2, 3)\n"
        "made = torch.compile(function, fullgraph=True, backend='aot_eager')(g)\n"
        "print(torch.equal(made, function(g)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_export(case):
    call = tensor_call(case)
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in call.items() if name not in tensors}

    class Module(torch.nn.Module):
        def forward(self, **tensors):
            return kda.torch.chunk_kda_fwd(**tensors, **constants, return_intermediate_states=True)[0]

    exported = torch.export.export(Module(), (), tensors)
    assert as_bytes(exported.module()(**tensors)) == as_bytes(kda.chunk_kda_fwd(**call).attn_out)
