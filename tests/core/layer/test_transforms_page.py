"""Each sentence of the page on transforms has a test, or is what a code block of the page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export

from cases import boundaries, inputs, layer_of, small
from nsa_core import InvalidInput, NSAConfig, block_attention, block_attention_decode

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "transforms.md"
BLOCK = "a code block of the page"  # Sybil runs it
# Sentence -> the tests in this folder, or BLOCK.
TESTS: dict[str, tuple[str, ...]] = {
    "`torch.func` works with `grad`, `vjp`, `jacrev` and `vmap`, and `torch.export` with "
    "dynamic batch and length.": (
        "test_per_sample_gradients_equal_a_loop",
        "test_vjp_equals_autograd_inside_and_after_the_transform",
        "test_nested_vmap_and_jacrev",
        "test_exported_layer_equals_the_layer_at_every_length",
    ),
    "`vmap` over `grad` computes one gradient per sample and parameter:": (
        BLOCK,
        "test_per_sample_gradients_equal_a_loop",
        "test_per_sample_gradients_with_other_options",
    ),
    "Packed documents (`cu_seqlens`) are not supported under `vmap`.": (
        "test_packed_documents_under_vmap_are_refused",
    ),
    "Call the layer once per sample in a loop.": (
        "test_packed_documents_in_a_loop_have_their_gradients",
    ),
    "NSA kernels have first derivatives, in reverse mode.": (
        "test_vjp_equals_autograd_inside_and_after_the_transform",
    ),
    "Other kinds raise `Unsupported`:": ("test_kernels_raise_unsupported_at_every_nesting",),
    "Forward mode: a tangent of `jvp`, `jacfwd`, `hessian`, `linearize` or "
    "`torch.autograd.forward_ad` reaches a kernel.": (
        "test_kernels_raise_unsupported_at_every_nesting",
        "test_linearize_raises_unsupported",
    ),
    "Second derivatives, from nested `grad` or `jacrev`, or from `create_graph=True`.": (
        "test_kernels_raise_unsupported_at_every_nesting",
        "test_second_derivatives_are_never_silently_zero",
    ),
    "Instead of a Hessian-vector product, take the difference of two gradients in float64.": (
        "test_differences_of_gradients_converge",
    ),
    "A backward of a batch of gradients (`is_grads_batched=True`, or `vectorize=True` in "
    "`torch.autograd.functional`).": ("test_kernels_refuse_a_batch_of_gradients",),
    "Use `jacrev`, or `vmap` over `vjp`.": ("test_nested_vmap_and_jacrev",),
    "Any tangent in steps with a cache and `block_attention_decode`, which have no gradient.": (
        "test_decode_steps_refuse_tangents",
        "test_steps_have_no_gradient",
    ),
    "Mark batch and length as dynamic.": (BLOCK,),
    "The minimum length must be at least `compress_block_size + compress_stride`, 48 by default:": (
        "test_the_minimum_length_of_an_export",
        "test_a_shorter_minimum_cannot_be_exported",
    ),
    "Before a process loads the program, it must import `nsa_core` and resolve the plan "
    "(`attn.plan`), because this defines the operators of the backends.": (
        "test_another_process_resolves_the_plan_before_it_loads",
    ),
    "A program has one plan, for the device and dtype of the example.": (
        "test_exported_function_equals_eager_and_has_the_plan_of_short_sequences",
    ),
    "Its results are correct for every length, but another plan may be faster for long "
    "sequences.": ("test_exported_function_equals_eager_and_has_the_plan_of_short_sequences",),
    "Packed calls with a dynamic number of rows or documents are not supported; use "
    "[`torch.compile`](cuda-graphs.md#compile-the-layer) for them.": (
        "test_packed_calls_with_dynamic_rows_cannot_be_exported",
    ),
}


def sentences(page: str) -> list[str]:
    """Return the sentences of a page, without headings, code blocks and marks."""
    prose = re.sub(r"^```.*?^```$|^#.*?$|^<!--.*?-->$", "", page, flags=re.DOTALL | re.MULTILINE)
    found = []
    for paragraph in re.split(r"\n\n|\n- ", prose):
        text = " ".join(paragraph.split()).removeprefix("- ")
        found += re.split(r"(?<=[.:]) (?=[A-Z`])", text)
    return [sentence for sentence in found if sentence]


def test_every_sentence_has_a_test() -> None:
    assert sentences(PAGE.read_text(encoding="utf-8")) == list(TESTS)
    defined = set[str]()
    for path in Path(__file__).parent.glob("test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M))
    named = {name for tests in TESTS.values() for name in tests}
    assert named - {BLOCK} <= defined


def test_packed_documents_in_a_loop_have_their_gradients() -> None:
    attn, cu = layer_of(), boundaries(9, 4)
    for sample in torch.randn(2, 13, 24, dtype=torch.float64):
        leaf = sample.clone().requires_grad_()
        (expected,) = torch.autograd.grad(attn(leaf, cu).square().sum(), leaf)
        actual = torch.func.grad(lambda x: attn(x, cu).square().sum())(sample)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_differences_of_gradients_converge() -> None:
    """Attention to all blocks is causal attention, which PyTorch differentiates twice."""
    i = inputs(small(), 1, 13)
    x, v, blocks = i.q, torch.randn_like(i.q), torch.arange(2).expand(1, 13, 2, 2)

    def causal(q: torch.Tensor) -> torch.Tensor:
        k, values = (t.repeat_interleave(2, 2).transpose(1, 2) for t in (i.k[0], i.v[0]))
        scores = q.transpose(1, 2) @ k.mT * 8**-0.5
        future = torch.ones(13, 13, dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ values).transpose(1, 2)

    def gradient(q: torch.Tensor) -> torch.Tensor:
        q = q.detach().requires_grad_()
        o = block_attention(q, i.k[0], i.v[0], blocks, block_size=8)
        return torch.autograd.grad(o.square().sum(), q)[0]

    expected = torch.autograd.functional.hvp(lambda q: causal(q).square().sum(), x, v)[1]
    actual = (gradient(x + 1e-5 * v) - gradient(x - 1e-5 * v)) / 2e-5
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_steps_have_no_gradient() -> None:
    attn, x = layer_of(), torch.randn(1, 1, 24, dtype=torch.float64)
    assert not attn(x, cache=attn.new_cache(1, 32)).requires_grad
    i, blocks = inputs(small(), 1, 16, requires_grad=True), torch.zeros(1, 1, 2, 1).int()
    with pytest.raises(InvalidInput, match="the decode form has no gradient"):
        block_attention_decode(
            i.q[:, :1], i.k[0], i.v[0], blocks, lengths=torch.tensor([16]).int(), block_size=8
        )


def test_the_minimum_length_of_an_export() -> None:
    geometry = NSAConfig(dim=32, n_heads=4, n_kv_heads=2).geometry
    least = geometry.compress_block_size + geometry.compress_stride
    counts = [geometry.num_compressed(length) for length in (least - 1, least)]
    assert (least, counts) == (48, [1, 2])


@pytest.mark.slow
def test_a_shorter_minimum_cannot_be_exported() -> None:
    shapes = {"x": {1: Dim("S", min=11, max=999)}}  # l + d is 12
    with pytest.raises(torch._dynamo.exc.UserError, match="min=12"):
        export(layer_of(torch.float32), (torch.randn(1, 40, 24),), dynamic_shapes=shapes)


@pytest.mark.slow
def test_another_process_resolves_the_plan_before_it_loads(tmp_path: Path) -> None:
    file = tmp_path / "program.pt2"
    torch.export.save(export(layer_of(torch.float32), (torch.randn(1, 40, 24),)), file)
    load = (
        f"import nsa_core, torch; torch.export.load({str(file)!r}).module()(torch.randn(1, 40, 24))"
    )
    plan = "from cases import layer_of; layer_of(torch.float32).plan; "
    run = {"capture_output": True, "text": True, "cwd": Path(__file__).parent}
    alone = subprocess.run([sys.executable, "-c", load], **run)
    assert alone.returncode == 1
    assert "deserializing the saved file" in alone.stderr
    text = load.replace("torch; ", f"torch; {plan}")
    done = subprocess.run([sys.executable, "-c", text], **run)
    assert done.returncode == 0, done.stderr
