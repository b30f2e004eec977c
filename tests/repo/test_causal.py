"""PyTorch aligns is_causal top-left: with L keys and one query it returns the first value. So it is
never passed unless the function that passes it has asserted as many queries as keys.
(FlashAttention-2 aligns bottom-right.)
"""

from __future__ import annotations

import ast

import pytest

# Shows what goes wrong: the fact behind the historic numbers.
SHOWS_THE_FAULT = {"tests/verify/report_rows/test_historic_numbers.py"}


def may_be_causal(call: ast.Call) -> bool:
    """Whether this call hands is_causal, by name or place, to one of PyTorch's scaled-dot-product
    entry points.
    """
    if any(
        k.arg == "is_causal" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
        for k in call.keywords
    ):
        return True
    name = ast.unparse(call.func).split(".")[-1]
    if name == "scaled_dot_product_attention":
        keywords = {k.arg for k in call.keywords}
        # Stars may hide it; where attn_mask, which stands before it, has a name, no place can reach
        # it.
        hidden = None in keywords or (
            any(isinstance(a, ast.Starred) for a in call.args) and "attn_mask" not in keywords
        )
        return hidden or len(call.args) > 5
    return name.startswith("_scaled_dot_product")  # the operators below it take is_causal by place


def asserts_equal_lengths(function: ast.AST, before: int) -> bool:
    """Whether an assert above line ``before`` demands equal sizes of two tensors, and says that it
    is for is_causal.
    """
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Assert)
            and node.lineno < before
            and node.msg
            and "is_causal" in ast.unparse(node.msg)
        ):
            test = node.test
            if isinstance(test, ast.Compare) and all(isinstance(op, ast.Eq) for op in test.ops):
                return all(
                    ".shape[" in ast.unparse(side) for side in (test.left, *test.comparators)
                )
    return False


def unguarded(tree: ast.Module) -> list[int]:
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and may_be_causal(node):
            around: ast.AST = node
            while around in parents and not isinstance(around, ast.FunctionDef):
                around = parents[around]
            if not (
                isinstance(around, ast.FunctionDef) and asserts_equal_lengths(around, node.lineno)
            ):
                lines.append(node.lineno)
    return lines


def test_is_causal_only_where_there_are_as_many_queries_as_keys(repo):
    trees = repo.python()
    wrong = [
        f"{n}:{line}"
        for n, tree in trees.items()
        if n not in SHOWS_THE_FAULT
        for line in unguarded(tree)
    ]
    assert not wrong, "\n".join(wrong)
    assert any(
        may_be_causal(c) for t in trees.values() for c in ast.walk(t) if isinstance(c, ast.Call)
    )


GUARD = 'assert q.shape[2] == k.shape[2], "is_causal"'


@pytest.mark.parametrize(
    ("body", "found"),
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
        ('assert q.shape[2] >= k.shape[2], "is_causal"\n    sdpa(q, k, v, is_causal=True)', True),
    ],
)
def test_the_search_finds_what_it_looks_for(body, found):
    assert bool(unguarded(ast.parse(f"def f(q, k, v):\n    {body}"))) == found
