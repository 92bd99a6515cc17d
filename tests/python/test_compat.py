"""The legacy names: programs for Ascend NPUs, with their device string changed and one import added."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
import threading

import pytest

import kda
from helpers import FULL, KEEP_ALL, PACKED, arguments, as_bytes, to_torch

torch = pytest.importorskip("torch")
import kda.compat  # noqa: E402

BOUNDS = [0, 65, 65, 70]
POSITIONAL = ("q", "k", "v", "g", "beta", "scale", "chunk_size")


@pytest.fixture(scope="module", autouse=True)
def registered():
    kda.compat.register()


def operators():
    from fla_npu.ops import ascendc

    return [
        torch.ops.npu.npu_chunk_kda_fwd,
        torch.ops._C_ascend.chunk_kda_fwd,
        ascendc.npu_chunk_kda_fwd,
        ascendc.chunk_kda_fwd,
    ]


def tensor_call(case=FULL, **changes):
    """Return positional and keyword arguments of the legacy form."""
    call = {name: to_torch(torch, value) for name, value in arguments(case).items()} | changes
    return [call.pop(name) for name in POSITIONAL], call


def printed_by(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("case", [FULL, PACKED, dataclasses.replace(PACKED, layout="NTD")], ids=["B", "N", "ntd"])
@pytest.mark.parametrize("flags", [{}, KEEP_ALL, dict.fromkeys(KEEP_ALL)], ids=["few", "all", "none"])
def test_chunk_kda_fwd(index, case, flags):
    positional, keywords = tensor_call(case)
    results = operators()[index](*positional, **keywords, **flags)
    expected = kda.chunk_kda_fwd(*positional, **keywords, **{name: bool(value) for name, value in flags.items()})
    assert len(results) == 12
    for name, result, wanted in zip(expected._fields, results, expected, strict=True):
        assert as_bytes(result) == as_bytes(wanted), name
    assert results[11] is keywords["initial_state"]


@pytest.mark.parametrize("index", range(4))
def test_what_the_legacy_form_is(index):
    operator = operators()[index]
    positional, keywords = tensor_call(PACKED, cu_seqlens=tuple(BOUNDS), chunk_indices=[0, 0, 0, 1, 2, 0])
    nothing = dict.fromkeys(
        ("disable_recompute", "output_final_state", "use_gate_in_kernel", "safe_gate", "lower_bound")
    )
    results = operator(*positional, **(keywords | nothing), return_intermediate_states=True)
    assert results[10].shape == (1, 3, 4, 32, 48)
    assert results[1] is None
    assert operator(*positional[:-1], **keywords)[0].shape == (1, 70, 4, 48)
    with pytest.raises((TypeError, RuntimeError)):
        operator(*positional, "BSND", **(keywords | {"layout": "BSND"}))
    rank3, others = tensor_call(dataclasses.replace(PACKED, layout="TND", state_v_first=True))
    assert operator(*rank3, **others, return_intermediate_states=True)[10].shape == (3, 4, 48, 32)
    dense, others = tensor_call(FULL)
    assert operator(*dense, **others, return_intermediate_states=True)[10].shape == (2, 2, 4, 32, 48)


def test_signatures_agree_with_schemas():
    from fla_npu.ops import ascendc

    pairs = [
        (torch.ops.npu.npu_chunk_kda_fwd, ascendc.npu_chunk_kda_fwd),
        (torch.ops._C_ascend.chunk_kda_fwd, ascendc.chunk_kda_fwd),
        (torch.ops.npu.npu_kda_gate_cumsum, ascendc.npu_kda_gate_cumsum),
        (torch.ops.ascend_ops.chunk_kda_fwd_direct, kda.chunk_kda_fwd_direct),
    ]
    for operator, function in pairs:
        schema = operator.default._schema
        # The legacy schemas are fixed: our own option is not among their arguments.
        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "state_products"]
        assert [a.name for a in schema.arguments] == [p.name for p in parameters]
        assert [a.kwarg_only for a in schema.arguments] == [p.kind is p.KEYWORD_ONLY for p in parameters]
        for argument, parameter in zip(schema.arguments, parameters, strict=True):
            if argument.has_default_value():
                assert argument.default_value == parameter.default
    assert len(torch.ops._C_ascend.chunk_kda_fwd.default._schema.returns) == 12


@pytest.mark.parametrize("lower_bound", [None, -4.0])
def test_call_of_vllm(lower_bound):
    """A prefill of vLLM's: raw gates, list metadata, an empty sequence, a state per sequence in [V, K]."""
    case = dataclasses.replace(PACKED, K=128, V=128, HV=2, T=134, state_v_first=True, cu_seqlens=(0, 0, 64, 134))
    call = {name: to_torch(torch, value) for name, value in arguments(case).items()}
    q, k, v, raw_gate, beta = (call[name] for name in ("q", "k", "v", "g", "beta"))
    with torch.inference_mode():
        out, final_state, *_ = torch.ops._C_ascend.chunk_kda_fwd(
            q,
            k,
            v,
            raw_gate,
            beta,
            128**-0.5,
            64,
            layout="BSND",
            initial_state=call["initial_state"],
            output_final_state=True,
            cu_seqlens=[0, 0, 64, 134],
            chunk_indices=[1, 0, 2, 0, 2, 1],
            safe_gate=lower_bound is not None,
            lower_bound=lower_bound if lower_bound is not None else -5.0,
            use_gate_in_kernel=True,
            A_log=call["A_log"].reshape(-1).contiguous(),
            dt_bias=call["dt_bias"],
            disable_recompute=False,
            return_intermediate_states=False,
            state_v_first=True,
        )
    expected = kda.chunk_kda_fwd(
        **(call | {"lower_bound": lower_bound, "safe_gate": lower_bound is not None, "scale": 128**-0.5}),
        output_final_state=True,
    )
    assert torch.equal(out, expected.attn_out)
    assert torch.equal(final_state, expected.final_state)
    assert torch.equal(final_state[0], call["initial_state"][0])


def test_gate_cumsum():
    from fla_npu.ops import ascendc

    g, a_log = torch.randn(1, 2, 70, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(2)
    made = {"A_log": a_log, "use_gate_in_kernel": True, "safe_gate": None, "cu_seqlens": BOUNDS}
    expected = kda.kda_gate_cumsum(g, 64, A_log=a_log, use_gate_in_kernel=True, cu_seqlens=BOUNDS)
    for operator in (torch.ops.npu.npu_kda_gate_cumsum, ascendc.npu_kda_gate_cumsum, ascendc.kda_gate_cumsum):
        assert torch.equal(operator(g, 64, **made), expected)


def test_direct():
    args, kwargs = direct_call()
    results = torch.ops.ascend_ops.chunk_kda_fwd_direct(*args, **kwargs, safe_gate=True)
    expected = kda.chunk_kda_fwd_direct(*args, **kwargs)
    assert len(results) == 12
    assert all(as_bytes(a) == as_bytes(b) for a, b in zip(results, expected, strict=True))
    assert results[2] is args[3]
    assert results[11] is kwargs["initial_state"]
    stateless = torch.ops.ascend_ops.chunk_kda_fwd_direct(*args, output_final_state=False)
    assert stateless[1] is stateless[11] is None


def test_modules():
    import fla_npu
    import fla_npu.ops.ascendc
    from fla_npu.ops import ascendc
    from mindspeed_ops.api.triton import kda_gate

    assert fla_npu.load_legacy_torch_ops().name.startswith("_kda")
    assert fla_npu.is_legacy_torch_ops_loaded()
    assert fla_npu.ops.ascendc is ascendc
    g, a_log = torch.linspace(-9, 9, 240).reshape(2, 5, 3, 8), torch.zeros(3)
    assert torch.equal(kda_gate.fused_kda_gate(g, a_log), kda.fused_kda_gate(g, a_log))
    assert torch.equal(kda_gate.naive_kda_gate(g, a_log), kda.naive_kda_gate(g, a_log))
    with pytest.raises(ModuleNotFoundError):
        import fla_npu.ops.triton


def test_errors_are_ours():
    positional, keywords = tensor_call(PACKED)
    with pytest.raises(ValueError, match="^chunk_kda_fwd: cu_seqlens: expected"):
        torch.ops.npu.npu_chunk_kda_fwd(*positional, **(keywords | {"cu_seqlens": [0, 69]}))
    positional[0].requires_grad_()
    with pytest.raises(ValueError, match="^chunk_kda_fwd: q: expected .*, got one that requires grad"):
        torch.ops.npu.npu_chunk_kda_fwd(*positional, **keywords)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("case", [FULL, PACKED], ids=["dense", "packed"])
def test_compiles(case):
    positional, keywords = tensor_call(case)
    expected = torch.ops.npu.npu_chunk_kda_fwd(*positional, **keywords, **KEEP_ALL)
    torch._dynamo.reset()
    function = torch.compile(
        lambda *args, **kwargs: torch.ops.npu.npu_chunk_kda_fwd(*args, **kwargs), fullgraph=True, backend="aot_eager"
    )
    for a, b in zip(function(*positional, **keywords, **KEEP_ALL), expected, strict=True):
        assert as_bytes(a) == as_bytes(b)


def direct_call():
    generator = torch.Generator().manual_seed(0)
    q = 0.1 * torch.rand(1, 2, 70, 128, generator=generator).half()
    v = torch.rand(1, 4, 70, 256, generator=generator).half()
    gk = kda.kda_gate_cumsum(-torch.rand(1, 4, 70, 128, generator=generator), 64)
    beta, state = torch.rand(1, 4, 70, generator=generator), torch.rand(1, 4, 128, 256, generator=generator)
    return (q, q, v, gk, beta, 0.1, 64), {"initial_state": state}


@pytest.mark.parametrize(
    ("operator", "call"),
    [
        ("npu::npu_chunk_kda_fwd", lambda: tensor_call(FULL)),
        ("_C_ascend::chunk_kda_fwd", lambda: tensor_call(PACKED, return_intermediate_states=True)),
        ("npu::npu_kda_gate_cumsum", lambda: ((torch.rand(1, 2, 70, 16), 32), {"cu_seqlens": BOUNDS})),
        ("ascend_ops::chunk_kda_fwd_direct", direct_call),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_opcheck(operator, call):
    namespace, _, name = operator.partition("::")
    args, kwargs = call()
    torch.library.opcheck(getattr(getattr(torch.ops, namespace), name).default, tuple(args), kwargs)


def test_registering_again_does_nothing():
    before = torch.ops.npu.npu_chunk_kda_fwd
    threads = [threading.Thread(target=kda.compat.register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    importlib.import_module("kda.compat.npu")
    assert torch.ops.npu.npu_chunk_kda_fwd is before


def test_nothing_is_there_without_asking():
    code = (
        "import sys, kda.compat\n"
        "print('torch' in sys.modules)\n"
        "import torch, kda.torch\n"
        "print(hasattr(torch.ops.npu, 'npu_chunk_kda_fwd'), 'fla_npu' in sys.modules)\n"
        "import kda.compat.npu\n"
        "print(hasattr(torch.ops.npu, 'npu_chunk_kda_fwd'), 'fla_npu' in sys.modules)"
    )
    assert printed_by(code) == ["False", "False False", "True True"]


@pytest.mark.parametrize("package", ["fla_npu", "mindspeed_ops"])
@pytest.mark.parametrize("loaded", [False, True])
def test_real_packages_are_not_hidden(tmp_path, package, loaded):
    (tmp_path / f"{package}.py").write_text("real = True\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"{f'import {package}' if loaded else ''}\n"
        "import kda.compat, torch\n"
        "try: kda.compat.register()\n"
        "except RuntimeError as error: print(error)\n"
        f"import {package}; print({package}.real)\n"
        "print([hasattr(torch.ops.npu, 'npu_chunk_kda_fwd'), hasattr(torch.ops._C_ascend, 'chunk_kda_fwd')])"
    )
    message, real, found = printed_by(code)
    assert message.startswith(f"compat.register: {package}: expected no package of this name, got a real one")
    assert (real, found) == ("True", "[False, False]")


@pytest.mark.parametrize(
    "name", ["npu::npu_chunk_kda_fwd", "_C_ascend::chunk_kda_fwd", "ascend_ops::chunk_kda_fwd_direct"]
)
def test_real_operators_are_not_replaced(name):
    namespace, _, operator = name.partition("::")
    code = (
        "import sys, torch, kda.compat\n"
        f"library = torch.library.Library({namespace!r}, 'FRAGMENT')\n"
        f"library.define('{operator}(Tensor q) -> Tensor')\n"
        "try: kda.compat.register()\n"
        "except RuntimeError as error: print(error)\n"
        "print('fla_npu' in sys.modules, hasattr(torch.ops.npu, 'npu_kda_gate_cumsum'))"
    )
    message, rest = printed_by(code)
    expected = f"compat.register: torch.ops.{namespace}.{operator}: expected no operator of this name, got a real one"
    assert message.startswith(expected)
    assert rest == "False False"


SCRIPT = """
import torch
import fla_npu
from fla_npu.ops.ascendc import npu_chunk_kda_fwd, npu_kda_gate_cumsum

fla_npu.load_legacy_torch_ops()
device = "npu"
B, T, H, K, V, C = 1, 128, 4, 128, 128, 64
torch.manual_seed(0)
q = torch.randn(B, T, H, K, device=device, dtype=torch.float16) * 0.08
k = torch.randn(B, T, H, K, device=device, dtype=torch.float16) * 0.08
v = torch.randn(B, T, H, V, device=device, dtype=torch.float16)
g = -0.01 * torch.rand(B, T, H, K, device=device)
beta = torch.rand(B, T, H, device=device)
outputs = npu_chunk_kda_fwd(q, k, v, g, beta, K**-0.5, C, layout="BSND", safe_gate=True, output_final_state=True)
legacy = torch.ops.npu.npu_chunk_kda_fwd(q, k, v, g, beta, K**-0.5, C, safe_gate=True, output_final_state=True)
gk = npu_kda_gate_cumsum(g.transpose(1, 2).contiguous(), C)
direct = torch.ops.ascend_ops.chunk_kda_fwd_direct(
    *(x.transpose(1, 2).contiguous() for x in (q, k, v)), gk, beta.transpose(1, 2).contiguous(), K**-0.5, C)
assert len(outputs) == len(legacy) == len(direct) == 12
for mine, other in zip(outputs[:3], legacy, strict=False):
    assert torch.equal(mine, other)
for mine, other in zip(outputs[:2], direct, strict=False):
    torch.testing.assert_close(mine, other)
print(tuple(outputs[0].shape), bool(torch.isfinite(outputs[0]).all()))
"""


def test_a_script_for_the_npu_runs_here():
    script = "import kda.compat.npu\n" + SCRIPT.replace('"npu"', '"cpu"')
    assert printed_by(script) == ["(1, 128, 4, 128) True"]
