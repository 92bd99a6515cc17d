"""The backend for flash-linear-attention: with FLA where it can be imported, and with the least of its registries."""

import functools
import importlib
import inspect
import logging
import subprocess
import sys
import types
import warnings

import pytest

import kda
from helpers import PACKED, arguments, to_torch

torch = pytest.importorskip("torch")
from kda.integrations import fla as integration  # noqa: E402

LOGGER = "kda.integrations.fla"


def real_fla():
    """Return FLA's function, or the reason why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("fla.ops.kda").chunk_kda
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Recorder:
    """What stands for FLA's own computation: says that it was reached, and with what."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return "FLA"


class BaseBackend:
    backend_type = "base"
    package_name = None
    env_var = None
    priority = 5

    @classmethod
    def is_available(cls):
        return cls.package_name is None

    @classmethod
    def is_enabled(cls):
        return True

    def verify(self, function_name, *args, **kwargs):
        verifier = getattr(self, f"{function_name}_verifier", None)
        if verifier is None:
            return True, None
        try:
            return verifier(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class Registry:
    def __init__(self):
        self.backends = []

    def register(self, backend):
        type(backend).is_available()
        self.backends = sorted([*self.backends, backend], key=lambda b: b.priority)

    def dispatch(self, function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            for backend in self.backends:
                if not (backend.is_available() and backend.is_enabled()):
                    continue
                if not backend.verify("chunk_kda", *args, **kwargs)[0]:
                    continue
                implementation = getattr(backend, "chunk_kda", None)
                if implementation is not None:
                    return implementation(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper


class Gone(BaseBackend):
    """A backend before ours that cannot be used, as on a machine without its package."""

    priority = 0
    package_name = "not_here"


def new_signature(recorder):
    def chunk_kda(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
        lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
        cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
    ):  # fmt: skip
        return recorder(q)

    return chunk_kda


def old_signature(recorder):
    def chunk_kda(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, lower_bound=None,
        disable_recompute=False, return_intermediate_states=False, cp_context=None, transpose_state_layout=False,
        **kwargs,
    ):  # fmt: skip
        return recorder(q)

    return chunk_kda


def module(name, **members):
    made = types.ModuleType(name)
    made.__path__ = []
    vars(made).update(members)
    return made


def stand_in(version, recorder):
    """Return FLA's modules as far as a backend needs them: of 0.6, with registries of functions, or of 0.5."""
    registry = Registry()
    registry.register(Gone())
    if version == "0.5":
        function = registry.dispatch(old_signature(recorder))
        backends = module("fla.ops.backends", BaseBackend=BaseBackend)
        others = {"fla.ops.backends": backends, "fla.ops.kda.backends": module("b", kda_registry=registry)}
    else:
        function = registry.dispatch(new_signature(recorder))

        def register(entry_point):
            assert entry_point is function
            return lambda backend: registry.register(backend())

        others = {"fla.backends": module("fla.backends", BaseBackend=BaseBackend, register=register)}
    common = {"fla": module("fla"), "fla.ops": module("fla.ops"), "fla.ops.kda": module("k", chunk_kda=function)}
    return common | others, function


@pytest.fixture(params=["0.5", "0.6", "real"])
def fla(request, monkeypatch):
    """Return the version, FLA's chunk_kda with our backend registered, and what records calls of FLA's own."""
    recorder = Recorder()
    if request.param == "real":
        function = real_fla()
        if isinstance(function, str):
            pytest.skip(f"FLA cannot be imported here: {function}")
    else:
        modules, function = stand_in(request.param, recorder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            monkeypatch.delitem(sys.modules, name)
        for name, made in modules.items():
            monkeypatch.setitem(sys.modules, name, made)
        monkeypatch.setattr(integration, "_backend", None)
    integration.register()
    integration.register()
    monkeypatch.setattr(integration._backend, "reasons", set())
    yield request.param, function, recorder
    integration.unregister()


def call(**changes):
    given = {name: to_torch(torch, value) for name, value in arguments(PACKED).items()}
    for name in ("layout", "chunk_indices", "safe_gate", "lower_bound", "chunk_size", "state_v_first"):
        del given[name]
    return given | {"cu_seqlens": torch.tensor([0, 65, 65, 70]), "output_final_state": True} | changes


def is_old(function):
    """Tell whether this is the FLA whose argument was still called transpose_state_layout."""
    return "transpose_state_layout" in inspect.signature(inspect.unwrap(function)).parameters


def passes_on(fla, reason, caplog, **given):
    """Check that a call goes on to FLA, and that the log says why, loudly only the first time."""
    version, function, recorder = fla
    for level in ("INFO", "DEBUG"):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, LOGGER):
            if version == "real":
                # FLA has no kernels for CPUs.
                with pytest.raises(Exception, match="."):
                    function(**given)
            else:
                assert function(**given) == "FLA"
                assert recorder.calls[-1][0][0] is given["q"]
        ours = [record for record in caplog.records if record.name == LOGGER]
        assert [record.levelname for record in ours] == [level]
        assert "passed on" in ours[0].message
        assert reason in ours[0].message


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_qk_l2norm_in_kernel": True},
        {"lower_bound": -3.0, "safe_gate": True},
        {"A_log": None, "lower_bound": -7.0},
        {"scale": None, "initial_state": None, "cu_seqlens": None, "output_final_state": False},
        {
            "cu_seqlens": torch.tensor([0, 65, 65, 70], dtype=torch.int32),
            "cu_seqlens_cpu": torch.tensor([0, 65, 65, 70]),
        },
        {"return_intermediate_states": True},
        {"cp_context": None},
        {"chunk_size": 128},
        {"state_products": "bfloat16"},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_supported_calls_are_ours(fla, mode, changes, caplog):
    _, function, recorder = fla
    given = call(**changes)
    expected = kda.chunk_kda(**given)
    with mode(), caplog.at_level(logging.DEBUG, LOGGER):
        results = function(**given)
    assert len(results) == len(expected)
    for actual, wanted in zip(results, expected, strict=True):
        assert actual is wanted or torch.equal(actual, wanted)
    assert not recorder.calls
    assert [record.message for record in caplog.records if record.name == LOGGER] == ["chunk_kda: computed by kda"]


def test_positional_arguments_have_the_meaning_that_fla_gives_them(fla):
    _, function, _ = fla
    given = call(use_gate_in_kernel=False, A_log=None, dt_bias=None)
    given["g"] = -given["g"].abs()
    tensors = [given.pop(name) for name in ("q", "k", "v", "g", "beta")]
    with torch.no_grad():
        sixth, more = given["cu_seqlens"], {}
        if not is_old(function):
            sixth, more = True, {"cu_seqlens": sixth}
        results = function(*tensors, 0.5, given["initial_state"], True, True, False, sixth, **more)
        expected = kda.chunk_kda(
            *tensors,
            scale=0.5,
            initial_state=given["initial_state"],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=not is_old(function),
            cu_seqlens=given["cu_seqlens"],
        )
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1])


def test_the_old_name_of_state_v_first(fla):
    _, function, _ = fla
    state = call()["initial_state"].transpose(-1, -2).contiguous()
    given = call(initial_state=state)
    expected = kda.chunk_kda(**given, state_v_first=True)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = function(**given, transpose_state_layout=True)
    assert torch.equal(results[1], expected[1])
    assert results[1].shape == (3, 4, 48, 32)
    deprecations = [warning for warning in caught if warning.category is DeprecationWarning]
    assert bool(deprecations) == (not is_old(function))


def test_grad_mode(fla, caplog):
    passes_on(fla, "grad mode is on", caplog, **call())


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("chunk_size: expected 64 or 128, got 32", {"chunk_size": 32}),
        ("q: expected dtype float16 or bfloat16, got float32", {"q": torch.zeros(1, 70, 2, 32)}),
        ("cp_context is not supported", {"cp_context": types.SimpleNamespace()}),
        ("head_first is not known, got bool False", {"head_first": False}),
        ("allow_neg_eigval", {"allow_neg_eigval": True}),
        ("lower_bound: expected a number in [-5, 0)", {"safe_gate": True, "lower_bound": -6.0}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 65, 65, 71])}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_calls_are_passed_on(fla, reason, changes, caplog):
    with torch.no_grad():
        passes_on(fla, reason, caplog, **call(**changes))


@pytest.mark.parametrize(("name", "value"), [("use_graph", True), ("max_num_seqs", 4)])
def test_graph_mode_is_passed_on(fla, name, value, caplog):
    if name not in inspect.signature(inspect.unwrap(fla[1])).parameters:
        pytest.skip("this FLA has no such argument")
    with torch.no_grad():
        passes_on(fla, f"{name} is not supported, got {type(value).__name__} {value}", caplog, **call(**{name: value}))


def test_meta_tensors_are_passed_on(fla, caplog):
    with torch.no_grad():
        passes_on(fla, "meta", caplog, **{n: x.to("meta") if n in "qkvg" else x for n, x in call().items()})


def test_a_call_that_is_none_of_fla(fla):
    _, function, recorder = fla
    with torch.no_grad(), pytest.raises(TypeError):
        function(call()["q"])
    assert not recorder.calls


def test_unregister_and_register_again(fla):
    version, function, recorder = fla
    integration.unregister()
    integration.unregister()
    with torch.no_grad():
        if version == "real":
            with pytest.raises(Exception, match="."):
                function(**call())
        else:
            assert function(**call()) == "FLA"
        integration.register()
        assert torch.equal(function(**call())[0], kda.chunk_kda(**call())[0])
    assert len(recorder.calls) == (0 if version == "real" else 1)


def test_reasons_are_not_kept_forever(fla, monkeypatch):
    monkeypatch.setattr(integration, "_MOST_REASONS", 2)
    backend = integration._backend()
    for chunk_size in range(5):
        assert not backend.chunk_kda_verifier(**call(chunk_size=chunk_size))[0]
    with torch.no_grad():
        for chunk_size in range(5):
            assert not backend.chunk_kda_verifier(**call(chunk_size=chunk_size))[0]
    assert len(integration._backend.reasons) == 2


def test_disabled_dispatch_is_an_error(monkeypatch):
    modules, _ = stand_in("0.6", Recorder())
    modules["fla.backends"]._DISPATCH_DISABLED = True
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(integration, "_backend", None)
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH: expected no such variable"):
        integration.register()
    integration.unregister()


def test_an_fla_without_backends_is_an_error(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("fla", "fla.ops", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, module(name, chunk_kda=new_signature(Recorder())))
    monkeypatch.setattr(integration, "_backend", None)
    with pytest.raises(ImportError, match="expected fla-core 0.5.0 or later"):
        integration.register()


def test_importing_the_integration_does_not_import_fla():
    code = "import sys, kda.integrations.fla; print([name for name in sys.modules if name.split('.')[0] == 'fla'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif(isinstance(real_fla(), str), reason="FLA cannot be imported here")
@pytest.mark.parametrize("grouped", [False, True])
def test_against_the_plain_recurrence_of_fla(grouped):
    naive = importlib.import_module("fla.ops.kda.naive")
    generator = torch.Generator().manual_seed(0)
    B, T, H, HV, K, V = 2, 150, 2, 4 if grouped else 2, 64, 32
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(B, T, HV, V, generator=generator)
    g, beta = -torch.rand(B, T, HV, K, generator=generator), torch.rand(B, T, HV, generator=generator)
    state = torch.randn(B, HV, K, V, generator=generator)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    expected = naive.naive_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True)
    integration.register()
    with torch.no_grad():
        actual = real_fla()(q, k, v, g, beta, initial_state=state, output_final_state=True)
    integration.unregister()
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 4e-3 * theirs.float().norm()
