"""Arrays of other libraries: results of the caller's kind, with the bits that NumPy gets."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import kda
from helpers import BFLOAT16, FULL, KEEP_ALL, PACKED, PLAIN, arguments, as_bytes, assert_same_bits, to_torch


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def torch_call(torch, case=FULL):
    return {name: to_torch(torch, value) for name, value in arguments(case).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strides", ["contiguous", "padded", "fused", "inner"])
@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_torch_has_the_bits_of_numpy(torch, case, dtype, strides):
    case = dataclasses.replace(case, dtype=dtype, strides=strides)
    call = torch_call(torch, case)
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert all(type(array) is torch.Tensor for array in result)
    assert result.attn_out.dtype == getattr(torch, dtype)
    assert result.final_state.dtype == torch.float32
    assert result.initial_state is call["initial_state"]
    assert_same_bits(result, kda.chunk_kda_fwd(**arguments(case), **KEEP_ALL))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_torch_metadata(torch, dtype):
    call = torch_call(torch, PACKED)
    expected = kda.chunk_kda_fwd(**call)
    call["cu_seqlens"] = torch.tensor(call["cu_seqlens"], dtype=getattr(torch, dtype))
    call["chunk_indices"] = torch.tensor([[0, 0], [0, 1], [2, 0]], dtype=getattr(torch, dtype))
    assert_same_bits(kda.chunk_kda_fwd(**call), expected)


def test_torch_metadata_of_one_element(torch):
    with pytest.raises(ValueError, match="cu_seqlens: expected .*, got 1 values"):
        kda.chunk_kda_fwd(**(torch_call(torch, PACKED) | {"cu_seqlens": torch.tensor([0])}))


def test_torch_tensors_without_memory_are_refused(torch):
    call = torch_call(torch)
    with pytest.raises(TypeError, match="^chunk_kda_fwd: q: expected a tensor with memory of its own, got a Tensor"):
        torch.func.vmap(lambda q: kda.chunk_kda_fwd(**(call | {"q": q})).attn_out)(call["q"][None])


def test_torch_gradients_are_refused_while_grad_mode_is_on(torch):
    call = torch_call(torch)
    expected = kda.chunk_kda_fwd(**call)
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        wanting = call | {name: call[name].clone().requires_grad_()}
        with pytest.raises(
            ValueError, match=f"^chunk_kda_fwd: {name}: expected .*no_grad.*, got one that requires grad"
        ):
            kda.chunk_kda_fwd(**wanting)
        with torch.no_grad():
            assert_same_bits(kda.chunk_kda_fwd(**wanting), expected)
        with torch.inference_mode():
            assert_same_bits(kda.chunk_kda_fwd(**wanting), expected)


def test_torch_inside_an_autograd_function(torch):
    call = torch_call(torch)

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            return kda.chunk_kda_fwd(**(call | {"q": q})).attn_out

        @staticmethod
        def backward(ctx, gradient):
            return None

    q = call["q"].clone().requires_grad_()
    out = Operator.apply(q)
    assert out.requires_grad
    assert as_bytes(out.detach()) == as_bytes(kda.chunk_kda_fwd(**call).attn_out)


def test_torch_tensors_without_plain_memory(torch):
    call = torch_call(torch)
    with pytest.raises(RuntimeError, match="chunk_kda_fwd: q: expected a device with a backend .*, got meta"):
        kda.chunk_kda_fwd(**(call | {"q": call["q"].to("meta")}))
    with pytest.raises(TypeError, match="chunk_kda_fwd: beta: expected a strided tensor, got .*sparse"):
        kda.chunk_kda_fwd(**(call | {"beta": call["beta"].to_sparse()}))
    negative = torch.ones(2, 70, 4, dtype=torch.complex64).conj().imag
    with pytest.raises(TypeError, match="chunk_kda_fwd: beta: expected .*resolve_neg.*, got .*negative bit"):
        kda.chunk_kda_fwd(**(call | {"beta": negative}))
    with pytest.raises(TypeError, match="chunk_kda_fwd: q: expected dtype float16 or bfloat16, got float8"):
        kda.chunk_kda_fwd(**(call | {"q": call["q"].to(torch.float8_e5m2)}))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_torch_that_flushes_subnormal_numbers_changes_no_bit(torch, num_threads):
    """A setting of the calling thread, which the threads of a pool would or would not share."""
    call = arguments(FULL) | KEEP_ALL
    call["v"] = (call["v"].astype(np.float32) * 1e-38).astype(BFLOAT16)
    call["initial_state"] = call["initial_state"] * np.float32(1e-39)
    g = arguments(PLAIN)["g"] - 100
    try:
        kda.set_num_threads(num_threads)
        expected, gate = kda.chunk_kda_fwd(**call), kda.fused_kda_gate(g[0], np.zeros(1, np.float32))
        assert 0 < np.abs(gate).max() < 1e-38
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU does not flush")
        assert_same_bits(kda.chunk_kda_fwd(**call), expected)
        assert kda.fused_kda_gate(g[0], np.zeros(1, np.float32)).tobytes() == gate.tobytes()
    finally:
        torch.set_flush_denormal(False)
        kda.set_num_threads(None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_nested_torch_tensors_are_refused(torch, layout):
    call = torch_call(torch)
    call["beta"] = torch.nested.nested_tensor([call["beta"][0]], layout=getattr(torch, layout))
    with pytest.raises(TypeError, match="chunk_kda_fwd: beta: expected a strided tensor, got a nested one"):
        kda.chunk_kda_fwd(**call)


def test_torch_parameters_and_views(torch):
    call = torch_call(torch)
    expected = kda.chunk_kda_fwd(**call)
    call["A_log"] = torch.nn.Parameter(call["A_log"], requires_grad=False)
    call["beta"] = torch.stack([call["beta"]] * 2)[1]
    call["v"] = call["v"].transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(kda.chunk_kda_fwd(**call), expected)


def test_results_follow_q(torch):
    numpy_call, tensors = arguments(FULL), torch_call(torch)
    expected = kda.chunk_kda_fwd(**numpy_call)
    assert type(kda.chunk_kda_fwd(**(numpy_call | {"q": tensors["q"]})).attn_out) is torch.Tensor
    assert_same_bits(kda.chunk_kda_fwd(**(tensors | {"q": numpy_call["q"]})), expected)


@pytest.fixture(scope="module")
def jnp():
    return pytest.importorskip("jax.numpy")


def jax_call(jnp, case=FULL):
    values = arguments(case).items()
    return {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in values}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_jax_has_the_bits_of_numpy(jnp, case, dtype):
    import jax

    case = dataclasses.replace(case, dtype=dtype)
    call = jax_call(jnp, case)
    result = kda.chunk_kda_fwd(**call, **KEEP_ALL)
    assert all(isinstance(array, jax.Array) for array in result)
    assert result.attn_out.dtype == dtype
    assert result.initial_state is call["initial_state"]
    assert_same_bits(result, kda.chunk_kda_fwd(**arguments(case), **KEEP_ALL))


def test_jax_results_own_their_memory(jnp):
    call = jax_call(jnp)
    results = [kda.chunk_kda_fwd(**call).attn_out for _ in range(20)]
    assert len({as_bytes(result) for result in results}) == 1


def test_jax_metadata_and_nothing_to_do(jnp):
    call = jax_call(jnp, PACKED)
    assert_same_bits(
        kda.chunk_kda_fwd(**(call | {"cu_seqlens": jnp.asarray(call["cu_seqlens"])})), kda.chunk_kda_fwd(**call)
    )
    empty = kda.chunk_kda_fwd(**jax_call(jnp, dataclasses.replace(FULL, T=0)), **KEEP_ALL)
    assert empty.attn_out.shape == (2, 0, 4, 48)


def test_jax_tracers_are_refused(jnp):
    import jax

    call = jax_call(jnp)
    with pytest.raises(TypeError, match="chunk_kda_fwd: q: expected an array of .*, got .*Tracer") as raised:
        jax.jit(lambda q: kda.chunk_kda_fwd(**(call | {"q": q})).attn_out)(call["q"])
    assert "\n" not in str(raised.value)


class Foreign:
    """The least that an array of another library offers: DLPack, and a module function from_dlpack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return Foreign

    @staticmethod
    def from_dlpack(other):
        return Foreign(np.from_dlpack(other))


def test_any_library_with_dlpack():
    case = dataclasses.replace(FULL, dtype="float16")
    call = arguments(case)
    foreign = {name: Foreign(value) if isinstance(value, np.ndarray) else value for name, value in call.items()}
    result = kda.chunk_kda_fwd(**foreign, **KEEP_ALL)
    assert all(type(array) is Foreign for array in result)
    for ours, theirs in zip(kda.chunk_kda_fwd(**call, **KEEP_ALL), result, strict=True):
        assert ours.tobytes() == theirs.array.tobytes()


def test_kda_imports_no_other_library():
    code = "import sys, kda; print([m for m in ('torch', 'jax', 'typer', 'rich', 'safetensors') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_plain_call_of_numpy_needs_no_ml_dtypes():
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import numpy as np, kda\n"
        "a = np.ones((1, 4, 1, 16), np.float16)\n"
        "print(kda.chunk_kda_fwd(a, a, a, -a.astype('f4'), np.ones((1, 4, 1), 'f4'), 0.25).attn_out.dtype)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "float16"


def test_plain_case_is_plain():
    assert kda.chunk_kda_fwd(**arguments(PLAIN)).attn_out.dtype == BFLOAT16
