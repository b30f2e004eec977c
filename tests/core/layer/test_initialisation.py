"""Every parameter has a gradient at the first step, unless it is zero by construction."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from cases import small
from nsa_core import NSAttention
from nsa_core.config import COMPRESS_KINDS, GATE_KINDS
from nsa_core.layer.unit_linear import Affine

pytestmark = pytest.mark.usefixtures("planned")
LENGTH = 44  # at least 4*l = 32, and more than n*l' = 32: some block is not selected

# If k_cmp is not rotated after phi, a vector added to all compressed keys adds one constant to all
# scores of a query, which no softmax changes. These parameters add only such a vector.
ONLY_SHIFT = {
    "mlp": {"phi_k.down.bias"},
    "linear": {"phi_k.proj.bias", "phi_k.position"},
    "conv": {"phi_k.bias"},
    "mean": set(),
    "attn_pool": set(),
}


def gradients(from_dense=False, **options):
    attn = NSAttention(small(**options)).double()
    if from_dense:
        attn.start_from_dense()
    x = torch.randn(2, LENGTH, 24, dtype=torch.float64)
    attn(x).square().sum().backward()
    return {n: (p.grad.norm() / p.numel() ** 0.5).item() for n, p in attn.named_parameters()}, attn


@pytest.mark.few_cases
@pytest.mark.parametrize("kind", COMPRESS_KINDS)
@pytest.mark.parametrize("gate", GATE_KINDS)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_every_parameter_has_a_gradient_at_the_first_step(kind, gate, qk_norm, shared_kv):
    norms, attn = gradients(compress=kind, gate=gate, qk_norm=qk_norm, shared_kv=shared_kv)
    assert {n: g for n, g in norms.items() if not g > 1e-5} == {}
    # Every row of the fused projection: all heads of q, and k and v of every branch.
    assert (attn.qkv.weight.grad.norm(dim=1) > 1e-5).all()
    for name, parameter in attn.named_parameters():
        assert (parameter.grad != 0).double().mean() > 0.99, name


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_every_parameter_has_a_gradient_at_the_start_from_a_dense_layer(kind):
    norms, attn = gradients(from_dense=True, compress=kind)
    assert {n: g for n, g in norms.items() if not g > 1e-5} == {}
    for name, parameter in attn.named_parameters():
        assert (parameter.grad != 0).double().mean() > 0.99, name
    if kind == "mlp":  # otherwise both halves would stay one linear map
        for layer in (attn.phi_k.up, attn.phi_v.up):
            upper, lower = layer.weight.grad.chunk(2)
            assert (upper + lower).norm() > 0.01 * upper.norm()


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
@pytest.mark.parametrize(
    "options", [{"rope": False}, {"rope_before_compress": True}], ids=["rope-off", "rope-first"]
)
def test_gradients_that_are_zero_by_construction(kind, options):
    norms, _ = gradients(compress=kind, **options)
    assert {n for n, g in norms.items() if g < 1e-12} == ONLY_SHIFT[kind]
    assert {n for n, g in norms.items() if g < 1e-5} == ONLY_SHIFT[kind]


def test_window_of_one_key_gives_its_key_no_gradient():
    norms, attn = gradients(window_size=1)
    rows = attn.qkv.weight.grad.norm(dim=1)
    k_win = slice(4 * 8 + 2 * 2 * 8, 4 * 8 + 3 * 2 * 8)
    assert rows[k_win].max() < 1e-12
    assert min(rows[: k_win.start].min(), rows[k_win.stop :].min()) > 1e-5
    assert min(norms.values()) > 1e-5


def test_docstring_lists_the_zero_gradients():
    names = set().union(*ONLY_SHIFT.values())
    for name in names:
        assert f"``{name}``" in NSAttention.__doc__


def test_one_optimiser_step_changes_all_parameters_and_lowers_the_loss():
    attn, x = NSAttention(small()).double(), torch.randn(2, LENGTH, 24, dtype=torch.float64)
    target = torch.randn(2, LENGTH, 24, dtype=torch.float64)
    before = {n: p.detach().clone() for n, p in attn.named_parameters()}
    optimiser = torch.optim.SGD(attn.parameters(), lr=1e-3)
    loss = (attn(x) - target).square().mean()
    loss.backward()
    optimiser.step()
    assert all(not torch.equal(p, before[n]) for n, p in attn.named_parameters())
    assert (attn(x) - target).square().mean() < loss


def test_report_row_19_gates_of_twelve_layers():
    layers = torch.nn.ModuleList([NSAttention(small(), layer=i) for i in range(12)]).double()
    x = torch.randn(2, LENGTH, 24, dtype=torch.float64)
    gates = []
    for layer in layers:
        layer.gate.register_forward_hook(lambda module, args, out: gates.append(out))
        x = torch.nn.functional.rms_norm(x + layer(x), (24,))
    x.square().mul(torch.randn_like(x)).sum().backward()
    for layer, gate in zip(layers, gates):
        assert (gate.mean((0, 1, 2)) - 0.5).abs().max() < 0.15  # balanced
        assert gate.std((0, 1)).min() > 0.03  # each varies from token to token
        assert (layer.gate.weight.grad != 0).all()
        assert (layer.gate.bias.grad != 0).all()


def _after_every_module(attn):
    """Initialise as frameworks do that build on the meta device: outer modules come first."""
    for module in attn.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.parametrize("reset", [NSAttention.reset_parameters, _after_every_module])
@pytest.mark.parametrize("gate", GATE_KINDS)
@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_a_layer_from_the_meta_device_has_the_distribution_of_a_new_one(kind, gate, reset):
    config = small(compress=kind, gate=gate, qk_norm=True, dim=192, head_dim=16, v_head_dim=16)
    new = dict(NSAttention(config).named_parameters())
    with torch.device("meta"):
        attn = NSAttention(config)
    attn.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.fill_(torch.nan)
    reset(attn)
    for name, parameter in attn.named_parameters():
        values, expected = parameter.double(), new[name].double()
        if expected.std() == 0:  # biases and norms
            assert torch.equal(values, expected), name
            continue
        error = (2 / values.numel()) ** 0.5  # of the logarithm of a standard deviation, doubled
        assert abs(values.std().log() - expected.std().log()) < 4 * error, name
        assert abs(values.mean() - expected.mean()) < 4 * error * expected.std(), name
    for linear in attn.modules():
        if isinstance(linear, (Affine, torch.nn.Linear)):  # outputs of one variance
            gain, error = getattr(linear, "gain", 1.0), linear.weight.numel() ** -0.5
            expected = gain * linear.in_features**-0.5
            assert linear.weight.std().item() == pytest.approx(expected, rel=4 * error)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_projection_is_an_exact_nn_linear_and_its_copy_initialises_itself(copied):
    attn = NSAttention(small())
    for original in (attn.qkv, attn.out):
        linear, before = copied(original), original.weight.clone()
        assert type(linear) is torch.nn.Linear  # bitsandbytes replaces no subclass
        linear.weight.data.zero_()
        linear.reset_parameters()
        assert linear.weight.std() > 0
        assert torch.equal(original.weight, before)


def test_a_layer_made_of_fake_tensors_trains():
    with torch._subclasses.FakeTensorMode():
        attn = NSAttention(small())
        attn(torch.randn(1, LENGTH, 24)).sum().backward()
    for parameter in attn.parameters():
        assert type(parameter.grad) is torch._subclasses.FakeTensor


def test_a_deleted_layer_frees_its_parameters_without_the_garbage_collector():
    attn = NSAttention(small())
    attn(torch.randn(1, LENGTH, 24)).sum().backward()
    parameters = {name: weakref.ref(parameter) for name, parameter in attn.named_parameters()}
    gc.disable()
    try:
        del attn
        assert [name for name, parameter in parameters.items() if parameter() is not None] == []
    finally:
        gc.enable()


def test_a_shallow_copy_of_a_deleted_projection_says_why_it_cannot_be_reset():
    attn = NSAttention(small())
    copied = copy.copy(attn.out)
    attn.out = torch.nn.Linear(2, 2)
    with pytest.raises(ReferenceError, match=r"copy layers by copy\.deepcopy"):
        copied.reset_parameters()
