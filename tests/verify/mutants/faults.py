"""Faults in prefill code: faults that NSA implementations have had, or likely editing mistakes."""

from __future__ import annotations

from harness import Mutant

_CMP, _WIN, _SEL = "nsa_backend_sdpa.cmp", "nsa_backend_sdpa.win", "nsa_backend_sdpa.sel"
_SELECT, _COMBINE = "nsa_backend_sdpa.select", "nsa_backend_sdpa.combine"
_CORE = "nsa_core.torch_ops.core_kernels"
_ENGINE, _ATEN = "nsa_backend_sdpa.engine", "nsa_backend_sdpa.aten"

MUTANTS = (
    # cmp
    Mutant(
        "cmp uses the query of the previous token",
        _CMP,
        "fold(x, groups, call.geometry, first_query",
        "fold(x.roll(1, 1), groups, call.geometry, first_query",
    ),
    Mutant(
        "cmp rows without a visible key are not zero",
        _CMP,
        "blank=blank,",
        "blank=blank + 1e-20,",
    ),
    Mutant(
        "cmp interleaves heads over the groups",
        _CMP,
        "    runs = fold(x, groups,",
        "    x = x.unflatten(2, (-1, groups)).transpose(2, 3).flatten(2, 3)\n"
        "    runs = fold(x, groups,",
    ),
    Mutant(
        "cmp drops the queries of an incomplete run",
        "nsa_core.fold",
        "            spans.append((rows, slice(runs - 1, runs), slice(0, remainder)))",
        "            pass",
    ),
    Mutant(
        "cmp reads one token of the previous run",
        "nsa_core.fold",
        "        entries[:, run, entry] = tokens[:, rows].unflatten(1, (-1, rows_per_run))",
        "        entries[:, run, entry] = tokens.roll(1, 1)[:, rows].unflatten("
        "1, (-1, rows_per_run))",
    ),
    Mutant(
        "cmp reads a token of the previous document",
        _CMP,
        "yield _Piece(rows, slice(first_cmp, first_cmp + count), part)",
        "yield _Piece(rows, slice(max(first_cmp - 1, 0), max(first_cmp - 1, 0) + count), part)",
    ),
    Mutant(
        "scale from the padded width if V is wider",
        _ATEN,
        "q4, k4, v4, 0.0, causal, scale=scale",
        "q4, k4, v4, 0.0, causal, scale=width**-0.5",
    ),
    # win
    Mutant(
        "win causal mask top-left aligned inside a tile",
        _WIN,
        "hidden = ((key < query) | (key >= query + window))",
        "hidden = ((key > query) | (key >= query + window))",
    ),
    Mutant(
        "win returns V of the first key",
        _WIN,
        "hidden = ((key < query) | (key >= query + window))",
        "hidden = ((key != query) | (key >= query + window))",
    ),
    Mutant(
        "win one key short",
        _WIN,
        "hidden = ((key < query) | (key >= query + window))",
        "hidden = ((key <= query) | (key >= query + window))",
    ),
    Mutant(
        "win sees one future token",
        _WIN,
        "hidden = ((key < query) | (key >= query + window))",
        "hidden = ((key < query) | (key > query + window))",
    ),
    Mutant(
        "win ignores the window up to length 2w",
        _WIN,
        "call.geometry.window_size >= q.shape[1]",
        "2 * call.geometry.window_size >= q.shape[1]",
    ),
    Mutant(
        "win attends across documents",
        _WIN,
        "(keys < tiles.start[:, None])[",
        "(keys < 0)[",
    ),
    # sel
    Mutant(
        "sel without its own token",
        _SEL,
        "hidden = (offset > (token - index * size)[..., None])",
        "hidden = (offset >= (token - index * size)[..., None])",
    ),
    Mutant(
        "sel counts a repeated block twice",
        _SEL,
        "valid[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]",
        "valid[..., 1:] &= blocks[..., 1:] != -1",
    ),
    Mutant("sel drops dv", _SEL, "            _add(dv, chunk.block, grads[2])\n", ""),
    # select
    Mutant(
        "select drops a local block",
        _SELECT,
        "(block > current - geometry.local_blocks)",
        "(block > current - geometry.local_blocks + 1)",
    ),
    Mutant(
        "select drops the first block",
        _SELECT,
        "(block < geometry.init_blocks)",
        "(block < geometry.init_blocks - 1)",
    ),
    Mutant(
        "select scores invisible tokens",
        _SELECT,
        "hidden = (last > position[..., None]) | (index < 0)",
        "hidden = (last > position[..., None]) & (last < 0) | (index < 0)",
    ),
    Mutant(
        "select reads Eq. 9 with 0-based indices",
        _SELECT,
        "p[..., offset - first :: per_block]",
        "p[..., offset - first + 1 :: per_block]",
    ),
    Mutant(
        "select omits the sum over the group",
        _SELECT,
        "for head in range(1, scores.shape[-2]):",
        "for head in range(1, 1):",
    ),
    Mutant(
        "select gives ties to the higher index",
        _SELECT,
        "rank.sort(dim=-1, descending=True, stable=True).indices[..., :n]",
        "(count - 1 - rank.flip(-1).sort(dim=-1, descending=True, stable=True).indices)[..., :n]",
    ),
    Mutant(
        "select gives every overlap the same weight",
        _SELECT,
        "scores.add_(overlapping, alpha=weight)",
        "scores.add_(overlapping)",
    ),
    Mutant(
        "select ignores the start of a document",
        _SELECT,
        "compressed_cu_seqlens(call.cu_seqlens, geometry)[:-1].long()",
        "compressed_cu_seqlens(call.cu_seqlens, geometry)[:-1].long() * 0",
    ),
    # blockwise attention of all branches
    Mutant("lse in log2", _ENGINE, "lse = row_sum.log()", "lse = row_sum.log2()"),
    Mutant(
        "output one millionth too large",
        _ENGINE,
        "o.div_(row_sum.masked_fill_(row_sum == 0, 1))",
        "o.div_(row_sum.masked_fill_(row_sum == 0, 1)).mul_(1 + 2**-20)",
    ),
    Mutant("dS without delta", _ENGINE, "ds.sub_(delta.unsqueeze(-1)).mul_(p)", "ds.mul_(p)"),
    Mutant(
        "dk without the scale",
        _ENGINE,
        "dk = product(ds_operand.transpose(1, 2), flat_q).mul_(scale)",
        "dk = product(ds_operand.transpose(1, 2), flat_q)",
    ),
    # combine
    Mutant(
        "combine exchanges two gates",
        _COMBINE,
        "total.addcmul_(g_sel, o_sel.to(gates.dtype))",
        "total.addcmul_(g_win, o_sel.to(gates.dtype))",
    ),
    Mutant(
        "combine backward uses the cmp gate in every branch",
        _COMBINE,
        "(wide * gate).to(do.dtype) for gate in gates",
        "(wide * gates[..., None, 0]).to(do.dtype) for _ in gates",
    ),
    Mutant(
        "combine backward limits the gates to 1",
        _COMBINE,
        "(wide * gate).to(do.dtype) for gate in gates",
        "(wide * gate.clamp(max=1)).to(do.dtype) for gate in gates",
    ),
    Mutant(
        "combine backward treats small gates as 0",
        _COMBINE,
        "(wide * gate).to(do.dtype) for gate in gates",
        "(wide * gate * (gate > 0.002)).to(do.dtype) for gate in gates",
    ),
    # the core
    Mutant(
        "win receives the keys of sel",
        _CORE,
        "slots.win(q, k_win, v_win",
        "slots.win(q, k_sel, v_win",
    ),
    Mutant(
        "outputs of sel and win exchanged before the gates",
        _CORE,
        "outputs = branches.o_cmp, branches.o_sel, branches.o_win",
        "outputs = branches.o_cmp, branches.o_win, branches.o_sel",
    ),
    Mutant(
        "select receives the lse of another head",
        _CORE,
        "slots.select(q, k_cmp, lse_cmp",
        "slots.select(q, k_cmp, lse_cmp.roll(1, -2)",
    ),
    Mutant(
        "dq of the first branch alone",
        _CORE,
        "dq = dq.add_(of_branch[0]) if direct",
        "dq = dq if direct",
    ),
    Mutant(
        "the backward exchanges the outputs of sel and win",
        _CORE,
        '"cu_seqlens", *Branches._fields)',
        '"cu_seqlens", "blocks", "o_cmp", "lse_cmp", "o_win", "lse_sel", "o_sel", "lse_win")',
    ),
    Mutant(
        "gradients of the outputs of cmp and win exchanged",
        _CORE,
        "of_outputs.pop()",
        "of_outputs.pop(0)",
    ),
    Mutant(
        "gradients of keys and values of sel and win exchanged",
        _CORE,
        "return (dq, *of_keys, dgates)",
        "return (dq, *of_keys[:2], *of_keys[4:], *of_keys[2:4], dgates)",
    ),
    Mutant(
        "rotary embedding over concatenated heads",
        "nsa_core.layer.rope",
        "pairs = x.unflatten(-1, (2, -1))",
        "pairs = x.flatten(-2).unflatten(-1, (2, x.shape[-2], -1)).transpose(-3, -2)",
    ),
    Mutant(
        "layer exchanges the keys of sel and win",
        "nsa_core.layer.projection",
        "(None, ks[0], ks[-1])",
        "(None, ks[-1], ks[0])",
    ),
    Mutant(
        "compressed keys rotated at i*l",
        "nsa_core.layer.projection",
        "            self.config.compress_stride,\n            self.config.qk_dim,",
        "            self.config.compress_block_size,\n            self.config.qk_dim,",
    ),
    Mutant(
        "phi without its position encoding",
        "nsa_core.layer.phi.joint",
        "e.flatten(1).unsqueeze(1).to(precise)",
        "e.flatten(1).unsqueeze(1).to(precise) * 0",
    ),
)
