"""is_causal is passed only after an assert that there are as many queries as keys.

PyTorch aligns the causal mask top-left: with one query and L keys it returns the first value.
FlashAttention-2 aligns it bottom-right.
"""

from __future__ import annotations

import ast

import pytest

# Reproduces the wrong alignment on purpose, which explains the historic numbers.
EXEMPT = {"tests/verify/report_rows/test_historic_numbers.py"}


def may_be_causal(call: ast.Call) -> bool:
    """Return whether a call may pass is_causal to PyTorch's attention, by keyword or position."""
    if any(
        keyword.arg == "is_causal"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        for keyword in call.keywords
    ):
        return True
    name = ast.unparse(call.func).split(".")[-1]
    if name == "scaled_dot_product_attention":
        keywords = {keyword.arg for keyword in call.keywords}
        # Starred arguments may hold it, unless attn_mask, which precedes it, is passed by keyword.
        in_starred = None in keywords or (
            any(isinstance(arg, ast.Starred) for arg in call.args) and "attn_mask" not in keywords
        )
        return in_starred or len(call.args) > 5
    return name.startswith("_scaled_dot_product")  # these operators take is_causal by position


def asserts_equal_lengths(function: ast.AST, before: int) -> bool:
    """Return whether an assert above line ``before`` compares two sizes and names is_causal."""
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Assert)
            and node.lineno < before
            and node.msg
            and "is_causal" in ast.unparse(node.msg)
        ):
            test = node.test
            if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
                *others, test = test.values  # "not causal or" the comparison
                if not all(
                    isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.Not) for x in others
                ):
                    return False
            if isinstance(test, ast.Compare) and all(isinstance(op, ast.Eq) for op in test.ops):
                return all(
                    ".shape[" in ast.unparse(side) for side in (test.left, *test.comparators)
                )
    return False


def unguarded_lines(tree: ast.Module) -> list[int]:
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and may_be_causal(node):
            scope: ast.AST = node
            while scope in parents and not isinstance(scope, ast.FunctionDef):
                scope = parents[scope]
            if not (
                isinstance(scope, ast.FunctionDef) and asserts_equal_lengths(scope, node.lineno)
            ):
                lines.append(node.lineno)
    return lines


def test_is_causal_needs_an_assert_of_as_many_queries_as_keys(repo):
    # A call cannot be causal without one of these words. To parse all files takes seconds.
    words = ("is_causal", "scaled_dot_product")
    texts = {repo.name(p): p.read_text("utf-8") for p in repo.files() if p.suffix == ".py"}
    trees = {
        name: ast.parse(text) for name, text in texts.items() if any(word in text for word in words)
    }
    errors = [
        f"{name}:{line}"
        for name, tree in trees.items()
        if name not in EXEMPT
        for line in unguarded_lines(tree)
    ]
    assert not errors, "\n".join(errors)
    assert any(
        may_be_causal(node)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    )


GUARD = 'assert q.shape[2] == k.shape[2], "is_causal"'


@pytest.mark.parametrize(
    ("body", "is_unguarded"),
    [
        ("sdpa(q, k, v, is_causal=True)", True),
        ("sdpa(q, k, v, is_causal=flag)", True),
        ("sdpa(q, k, v, is_causal=False)", False),
        ("F.scaled_dot_product_attention(q, k, v, None, 0.0, True)", True),
        ("F.scaled_dot_product_attention(q, k, v, **options)", True),
        ("F.scaled_dot_product_attention(*all)", True),
        ("F.scaled_dot_product_attention(q, *rest, attn_mask=mask)", False),
        ("aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)", True),
        (f"{GUARD}\n    aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)", False),
        (f"{GUARD}\n    sdpa(q, k, v, is_causal=True)", False),
        (f"sdpa(q, k, v, is_causal=True)\n    {GUARD}", True),
        (
            f"{GUARD.replace('assert', 'assert not causal or')}\n    sdpa(q, is_causal=causal)",
            False,
        ),
        (f"{GUARD.replace('assert', 'assert causal or')}\n    sdpa(q, is_causal=causal)", True),
        ('assert q.shape[2] >= k.shape[2], "is_causal"\n    sdpa(q, k, v, is_causal=True)', True),
    ],
)
def test_unguarded_calls_are_detected(body, is_unguarded):
    tree = ast.parse(f"def f(q, k, v):\n    {body}")
    assert bool(unguarded_lines(tree)) == is_unguarded
