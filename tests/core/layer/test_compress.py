"""Every kind of phi against its formula, written block by block."""

import math

import pytest
import torch
import torch.nn.functional as F

from cases import boundaries, layer_of
from nsa_core.config import COMPRESS_KINDS
from nsa_core.layer.phi.chunks import packed_blocks
from nsa_core.layer.phi.kinds import compress_pair, make_phi, mean_compress, weights_of_pair
from nsa_core.layout import BlockGeometry

GEOMETRIES = {
    "paper": BlockGeometry(),
    "l8d4": BlockGeometry(8, 4, 8, 4),
    "l=d": BlockGeometry(4, 4, 8, 4),
    "d=1": BlockGeometry(3, 1, 5, 4),
    "l6d2": BlockGeometry(6, 2, 8, 4),
    "l=1": BlockGeometry(1, 1, 2, 4),
}
LENGTHS = {"paper": (0, 31, 32, 47, 48, 101)}


def compress_block(kind: str, p: dict[str, torch.Tensor], block: torch.Tensor) -> torch.Tensor:
    """phi of one block [l, D] of one head, by the formulas of docs/explanation/semantics.md."""
    if kind == "mean":
        return block.mean(0)
    if kind == "conv":
        return (
            torch.stack([(block[:, c] * p["weight"][c, 0]).sum() for c in range(block.shape[1])])
            + p["bias"]
        )
    block = block + p["position"]
    if kind == "linear":
        return p["proj.weight"] @ block.flatten() + p["proj.bias"]
    if kind == "mlp":
        hidden = F.gelu(p["up.weight"] @ block.flatten() + p["up.bias"])
        return p["down.weight"] @ hidden + p["down.bias"]
    weights = (block @ p["query"] / math.sqrt(block.shape[1])).softmax(0)
    return weights @ block


def reference(
    kind: str, p: dict[str, torch.Tensor], x: torch.Tensor, g: BlockGeometry
) -> torch.Tensor:
    """x [B, S, G, D] -> [B, n_c, G, D], in loops."""
    starts = range(0, x.shape[1] - g.compress_block_size + 1, g.compress_stride)
    out = x.new_zeros(x.shape[0], len(starts), *x.shape[2:])
    for b in range(x.shape[0]):
        for i, start in enumerate(starts):
            for head in range(x.shape[2]):
                out[b, i, head] = compress_block(
                    kind, p, x[b, start : start + g.compress_block_size, head]
                )
    return out


def phi_of(kind: str, geometry: BlockGeometry, width: int = 5) -> torch.nn.Module:
    phi = make_phi(kind, geometry, width).double()
    with torch.no_grad():
        # Initial biases are 0, which would hide a missing bias.
        for parameter in phi.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return phi


@pytest.mark.few_cases
@pytest.mark.parametrize("kind", COMPRESS_KINDS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_dense_is_the_formula_forward_and_backward(kind, name):
    geometry, phi = GEOMETRIES[name], phi_of(kind, GEOMETRIES[name])
    for length in LENGTHS.get(name, (0, 1, 5, 8, 11, 12, 21)):
        x = torch.randn(2, length, 2, 5, dtype=torch.float64, requires_grad=True)
        parameters = dict(phi.named_parameters())
        got, expected = phi(x), reference(kind, parameters, x, geometry)
        assert got.shape == (2, geometry.num_compressed(length), 2, 5)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        do = torch.randn_like(got)
        wrt = [x, *parameters.values()]
        grads = torch.autograd.grad(
            got, wrt, do, allow_unused=length < geometry.compress_block_size
        )
        if got.numel():
            torch.testing.assert_close(
                grads, torch.autograd.grad(expected, wrt, do), rtol=1e-11, atol=1e-11
            )


@pytest.mark.few_cases
@pytest.mark.parametrize("kind", COMPRESS_KINDS)
@pytest.mark.parametrize(("batch", "length"), [(0, 21), (0, 8), (0, 5), (0, 0), (2, 0), (2, 7)])
def test_calls_without_blocks_are_empty_forward_and_backward(kind, batch, length):
    """No sequence, no token, or fewer than l tokens: phi of one tensor, of two, and in a layer."""
    phis = [phi_of(kind, GEOMETRIES["l8d4"]) for _ in range(2)]
    xs = [
        torch.randn(batch, length, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)
    ]
    outs = [phis[0](xs[0]), *compress_pair(*phis, *xs, None)]
    blocks = GEOMETRIES["l8d4"].num_compressed(length)
    assert [tuple(y.shape) for y in outs] == [(batch, blocks, 2, 5)] * 3
    wrt = [*xs, *(p for phi in phis for p in phi.parameters())]
    grads = torch.autograd.grad(outs, wrt, [*map(torch.ones_like, outs)], allow_unused=True)
    assert all(g is None or not g.any() for g in grads)
    attn = layer_of(compress=kind)
    x = torch.randn(batch, length, attn.config.dim, dtype=torch.float64, requires_grad=True)
    y = attn(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    assert all(p.grad is None or p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.few_cases
@pytest.mark.parametrize("kind", COMPRESS_KINDS)
@pytest.mark.parametrize(
    "lengths",
    [(21,), (8, 3, 0, 17, 12, 1), (0, 0), (0, 9, 0), (2, 2, 2), (7, 9, 8, 13, 3), (7, 7, 7, 7, 11)],
)
def test_row_18_packed_equals_separate_and_the_tail_is_finite_and_without_gradient(kind, lengths):
    geometry = GEOMETRIES["l8d4"]
    phi, cu = phi_of(kind, geometry), boundaries(*lengths)
    total = int(cu[-1])
    x = torch.randn(total, 2, 5, dtype=torch.float64, requires_grad=True)
    got = phi(x, packed_blocks(cu, total, geometry))
    assert got.shape == (total // 4, 2, 5)
    assert torch.isfinite(got).all()
    separate = torch.cat([phi(x[a:b][None])[0] for a, b in zip(cu.tolist(), cu.tolist()[1:])])
    torch.testing.assert_close(got[: len(separate)], separate, rtol=1e-13, atol=1e-13)
    wrt = [x, *phi.parameters()]
    do = torch.randn_like(separate)
    expected = torch.autograd.grad(separate, wrt, do)
    full = torch.cat([do, do.new_zeros(len(got) - len(do), 2, 5)])
    torch.testing.assert_close(
        torch.autograd.grad(got, wrt, full), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
@pytest.mark.parametrize("name", ["paper", "l8d4", "d=1", "l=1"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Tokens reach 13. bf16 rounds 1/l and the result to 2**-9 of their size.
    [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 13 * 2**-8)],
)
def test_a_phi_that_starts_as_the_mean_is_the_mean(kind, name, dtype, tolerance):
    """One block, several, two tensors of different widths or one width, and packed documents."""
    geometry, cu = GEOMETRIES[name], boundaries(*LENGTHS.get(name, (8, 3, 21)))
    close = {"rtol": 0, "atol": tolerance}
    phis = {}
    for width in (5, 6):
        with torch.device("meta"):
            phi = make_phi(kind, geometry, width).to(dtype)
            phi.start_as_mean()
        phis[width] = phi.to_empty(device="cpu")
        for parameter in phi.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        phi.start_as_mean()
    for length, width in ((geometry.compress_block_size, 5), (101, 5), (101, 6)):
        k, v = (torch.randn(2, length, 2, n, dtype=dtype) * 3 for n in (5, width))
        compressed = compress_pair(phis[5], phis[width], k, v, None)
        torch.testing.assert_close(compressed[0], mean_compress(k, geometry), **close)
        torch.testing.assert_close(compressed[1], mean_compress(v, geometry), **close)
    x = torch.randn(int(cu[-1]), 2, 5, dtype=dtype) * 3
    packed = packed_blocks(cu, len(x), geometry)
    rows = sum(geometry.num_compressed(n) for n in cu.diff().tolist())
    expected = mean_compress(x, geometry, packed)[:rows]
    torch.testing.assert_close(phis[5](x, packed)[:rows], expected, **close)


def test_packed_starts_are_positions_inside_the_document():
    geometry = GEOMETRIES["l8d4"]
    places = packed_blocks(boundaries(3, 17, 0, 12), 32, geometry)
    assert places.starts[:5].tolist() == [0, 4, 8, 0, 4]


@pytest.mark.parametrize(
    "cu", [[0, 40, 10, 20], [5, 9, 20], [0, 1000], [-7, 3, 20], [0, 2**31 - 1]]
)
def test_row_17_malformed_boundaries_stay_in_bounds(cu):
    places = packed_blocks(torch.tensor(cu, dtype=torch.int32), 20, GEOMETRIES["l8d4"])
    assert ((places.tokens >= 0) & (places.tokens < 20)).all()
    for kind in COMPRESS_KINDS:  # index_select raises on an index out of bounds
        phi_of(kind, GEOMETRIES["l8d4"])(torch.randn(20, 2, 5, dtype=torch.float64), places)


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_strided_input_gives_the_same_bits(kind):
    phi = phi_of(kind, GEOMETRIES["l8d4"])
    buffer = torch.randn(2, 21, 2, 13, dtype=torch.float64)
    assert torch.equal(phi(buffer[..., 4:9]), phi(buffer[..., 4:9].contiguous()))


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_near_fp64(kind, dtype):
    geometry, width = BlockGeometry(), 32
    phi = make_phi(kind, geometry, width).to(dtype)
    x = torch.randn(2, 200, 2, width).to(dtype)
    got = phi(x)
    assert got.dtype == dtype
    exact = make_phi(kind, geometry, width).double()
    exact.load_state_dict(phi.state_dict())
    expected = exact(x.double())
    error = (got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < torch.finfo(dtype).eps


def test_mean_sums_in_fp32():
    x = torch.ones(1, 32, 1, 1, dtype=torch.bfloat16)
    x[0, 0], x[0, 16:] = 256, -1
    x[0, 16] = -255
    # Chunks of 16 sum to 271, which bf16 rounds to an even number, and to -270.
    assert mean_compress(x, BlockGeometry()).item() == 1 / 32


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_backward_keeps_one_copy_of_the_tokens(kind):
    geometry, width = BlockGeometry(), 16
    x = torch.randn(1, 2048, 2, width, requires_grad=True)
    phi, saved = make_phi(kind, geometry, width), {}
    parameters = {p.untyped_storage().data_ptr() for p in phi.parameters()}

    def keep(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        phi(x)
    saved_bytes = sum(size for pointer, size in saved.items() if pointer not in parameters)
    # One copy of x, and S/d rows of hidden units or weights, not the l/d copies of overlapping
    # blocks.
    assert saved_bytes <= 1.7 * x.numel() * x.element_size()


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_initial_output_has_about_the_variance_of_the_input(kind):
    phi = make_phi(kind, BlockGeometry(), 64)
    out = phi(torch.randn(1, 1024, 2, 64))
    # Means of 32 tokens have a standard deviation of 1 / sqrt(32).
    minimum = {"mean": 0.15, "conv": 0.15, "attn_pool": 0.2}.get(kind, 0.7)
    assert minimum < out.std().item() < 1.4


@pytest.mark.few_cases
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("length", [33, 64, 71])
def test_mean_node_equals_the_single_operators(name, length):
    """Under torch.func the mean consists of PyTorch's operators, in eager mode of one node."""
    geometry = GEOMETRIES[name]
    x = torch.randn(2, length, 3, 4, dtype=torch.float64, requires_grad=True)
    mean = mean_compress(x, geometry)
    assert mean.grad_fn is None or type(mean.grad_fn).__name__ == "_MeanBackward"
    by_ops, pull = torch.func.vjp(lambda y: mean_compress(y, geometry), x.detach())
    torch.testing.assert_close(mean, by_ops, rtol=1e-14, atol=1e-15)
    grad = torch.randn_like(mean)
    (grads,) = torch.autograd.grad(mean, x, grad, create_graph=True)
    torch.testing.assert_close(grads, pull(grad)[0], rtol=1e-14, atol=1e-15)
    assert torch.autograd.gradgradcheck(lambda y: mean_compress(y, geometry), x[:1, :, :1, :1])


PAIRED = ("linear", "mlp")


def pair_of(kind, dtype=torch.float64):
    geometry = GEOMETRIES["l8d4"]
    phis = [phi_of(kind, geometry).to(dtype) for _ in range(2)]
    return phis, [torch.randn(2, 23, 2, 5, dtype=dtype, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_joint_compression_equals_separate_compression(kind):
    phis, xs = pair_of(kind)
    wrt = [*xs, *(p for phi in phis for p in phi.parameters())]
    joint = compress_pair(*phis, *xs, None)
    assert (type(joint[0].grad_fn).__name__ == "JointPhiBackward") == (kind in PAIRED)
    separate, do = [phi(x) for phi, x in zip(phis, xs)], [torch.randn_like(y) for y in joint]
    torch.testing.assert_close(list(joint), separate, rtol=1e-13, atol=1e-13)
    grads, expected = (torch.autograd.grad(list(y), wrt, do) for y in (joint, separate))
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", PAIRED)
def test_a_phi_in_fp32_beside_one_in_bf16_is_compressed_separately(kind):
    phis, xs = pair_of(kind, torch.bfloat16)
    phis[0].float()
    joint, separate = compress_pair(*phis, *xs, None), [phi(x) for phi, x in zip(phis, xs)]
    assert all(torch.equal(*pair) for pair in zip(joint, separate))


@pytest.mark.parametrize("kind", PAIRED)
def test_phi_node_equals_the_single_operators(kind):
    """Under torch.func phi consists of PyTorch's operators, in eager mode of one node."""
    (phi, _), (x, _) = pair_of(kind)
    parameters = dict(phi.named_parameters())
    by_ops, pull = torch.func.vjp(lambda p, y: torch.func.functional_call(phi, p, y), parameters, x)
    got = phi(x)
    assert type(got.grad_fn).__name__ == "JointPhiBackward"
    torch.testing.assert_close(got, by_ops, rtol=1e-13, atol=1e-13)
    do = torch.randn_like(got)
    dp, dx = pull(do)
    grads = torch.autograd.grad(got, [x, *parameters.values()], do)
    torch.testing.assert_close(list(grads), [dx, *dp.values()], rtol=1e-12, atol=1e-12)


@pytest.mark.few_cases("linear-1-False")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "products"), [("linear", 1), ("mlp", 2)])
def test_compiled_pair_shares_its_products(kind, products, packed):
    phis, xs = pair_of(kind)
    blocks = None
    if packed:
        xs = [x[0].detach().requires_grad_() for x in xs]
        blocks = packed_blocks(boundaries(9, 14), 23, phis[0].geometry)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda *x: compress_pair(*phis, *x, blocks), backend=backend, fullgraph=True
    )
    wrt = [*xs, *(p for phi in phis for p in phi.parameters())]
    got, expected = compiled(*xs), [phi(x, blocks) for phi, x in zip(phis, xs)]
    called = [node.target for graph in graphs for node in graph.graph.nodes]
    assert sum(called.count(each) for each in (torch.bmm, torch.baddbmm, F.linear)) == products
    torch.testing.assert_close(list(got), expected, rtol=1e-13, atol=1e-13)
    do = [torch.randn_like(y) for y in got]
    grads, by_phi = (torch.autograd.grad(list(y), wrt, do) for y in (got, expected))
    torch.testing.assert_close(grads, by_phi, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_inductor_compiles_sequences_shorter_than_a_block(kind):
    """Their number of blocks is a symbol of value 0; of 3 tokens, so is that of chunks."""
    torch._dynamo.reset()
    phi = phi_of(kind, GEOMETRIES["l8d4"]).float()
    compiled = torch.compile(phi, dynamic=True)
    for length in (40, 5, 3):
        x = torch.randn(2, length, 2, 5)
        torch.testing.assert_close(compiled(x), phi(x))


@pytest.mark.parametrize("kind", PAIRED)
def test_dtypes_of_outputs_and_gradients_under_autocast(kind):
    phis, xs = pair_of(kind, torch.float32)
    low = [x.detach().bfloat16().requires_grad_() for x in xs]
    with torch.autocast("cpu", torch.bfloat16):
        got = compress_pair(*phis, *low, None)
    assert [y.dtype for y in got] == [torch.bfloat16] * 2
    exact, do = [phi(x) for phi, x in zip(phis, xs)], [torch.randn_like(y) for y in got]
    parameters = [p for phi in phis for p in phi.parameters()]
    grads = torch.autograd.grad(list(got), [*low, *parameters], do)
    expected = torch.autograd.grad(exact, [*xs, *parameters], [t.float() for t in do])
    assert [g.dtype for g in grads] == [torch.bfloat16] * 2 + [torch.float32] * len(parameters)
    for one, other in zip([*got, *grads], [*exact, *expected]):
        assert (one.float() - other).norm() < 0.02 * other.norm()


def test_hooks_on_phi_are_called_and_other_widths_are_compressed_separately():
    phis, xs = pair_of("mlp")
    seen = []
    phis[1].register_forward_hook(lambda *_: seen.append("v"))
    phis[0].forward = lambda *args, own=phis[0].forward: seen.append("k") or own(*args)
    k, v = compress_pair(*phis, *xs, None)
    assert seen == ["k", "v"]
    phis[1].register_full_backward_pre_hook(lambda *_: seen.append("gradient"))
    sum(y.sum() for y in compress_pair(*phis, *xs, None)).backward()
    assert seen[-1] == "gradient"
    wide = phi_of("mlp", GEOMETRIES["l8d4"], 7)
    k, v = compress_pair(phis[0], wide, xs[0], torch.randn(2, 23, 2, 7, dtype=torch.float64), None)
    assert (k.shape[-1], v.shape[-1]) == (5, 7)


@pytest.mark.parametrize("frozen", ["position", "up.weight", "up.bias", "down.weight", "x"])
def test_frozen_inputs_do_not_change_other_gradients(frozen):
    (phi, _), (x, _) = pair_of("mlp")
    leaves = {"x": x, **dict(phi.named_parameters())}
    do = torch.randn_like(phi(x))
    all_grads = dict(zip(leaves, torch.autograd.grad(phi(x), list(leaves.values()), do)))
    leaves.pop(frozen).requires_grad_(False)
    for name, grad in zip(leaves, torch.autograd.grad(phi(x), list(leaves.values()), do)):
        torch.testing.assert_close(grad, all_grads[name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("moved", ["", "position", "bias"])
def test_a_fused_form_takes_weights_of_the_device_of_the_cache(kind: str, moved: str) -> None:
    phi_k, phi_v = (make_phi(kind, GEOMETRIES["l8d4"], 6) for _ in range(2))
    if moved == "position":
        phi_v.position = torch.nn.Parameter(phi_v.position.to("meta"))
    elif moved:
        layer = phi_v.linears()[-1]
        layer.bias = torch.nn.Parameter(layer.bias.to("meta"))
    weights = weights_of_pair(phi_k, phi_v, *torch.zeros(2, 1, 8, 2, 6))
    if moved:
        assert weights is None
    else:
        assert weights is not None
        for phi, tensors in zip((phi_k, phi_v), weights, strict=True):
            assert list(map(id, tensors)) == list(map(id, phi.parameters()))
