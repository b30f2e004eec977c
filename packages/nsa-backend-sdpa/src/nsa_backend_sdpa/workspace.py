"""Peak bytes of each slot beyond its inputs: outputs, what is kept for backward, gradients, and the
largest step.

Forward runs first; where the request needs gradients its outputs stay alive while backward runs.
Terms are named after the tensors of the modules they describe; index tensors of a step are left
out. Packed: ``batch`` counts documents.
"""

from __future__ import annotations

from nsa_backend_sdpa import aten, cudnn, engine
from nsa_backend_sdpa.sel import queries_per_run as sel_queries
from nsa_backend_sdpa.select import Cut as SelectCut
from nsa_backend_sdpa.select import columns as select_columns
from nsa_backend_sdpa.sizes import Sizes
from nsa_backend_sdpa.tiles import runs
from nsa_backend_sdpa.win import Cut as WinCut
from nsa_core.contract import Request

_SMALL_SORT = 4096  # elements of a row that PyTorch's CUDA sort sorts in place


def _peak(size: Sizes, forward: int, backward: int) -> int:
    """``forward`` holds its outputs; ``backward`` is what it adds to them."""
    return max(forward, size.outputs + backward) if size.request.needs_grad else forward


def combine(request: Request) -> int:
    """One product wide, one widened output; backward: the widened do, a product, three gradients
    and dgates.
    """
    size = Sizes(request)
    item, stat, rows = size.item, size.stat, size.tokens * request.n_heads
    wide = stat if item != stat else 0
    forward = rows * request.v_head_dim * max(stat + wide, stat + (item if wide else 0))
    backward = rows * (
        request.v_head_dim * (wide + (2 * item + wide + item if wide else 3 * stat)) + 3 * stat
    )
    return (
        max(forward, rows * request.v_head_dim * item + backward) if request.needs_grad else forward
    )


def select(request: Request) -> int:
    """The chosen blocks and a step: its probabilities, their sums per block, or the sort."""
    size, geometry = Sizes(request), request.geometry
    if not size.tokens:
        return 0
    cut = SelectCut.of(
        request.geometry, size.longest, request.n_kv_heads, size.heads, size.stat, size.budget
    )
    per_document = 0 if request.varlen else -(-size.longest // cut.size)
    count = (
        size.tokens // cut.size + size.documents
        if request.varlen
        else size.documents * per_document
    )
    largest = before = 0
    for part, longest in runs(count, cut.tiles, cut.size, size.longest, per_document):
        tiles, blocks = part.stop - part.start, geometry.num_select_blocks(longest)
        scores = tiles * cut.groups * cut.size * blocks * size.stat
        # a step of several parts begins beside its own last scores
        again = cut.groups < request.n_kv_heads
        largest = max(largest, _select_step(size, tiles, cut, longest, scores if again else before))
        before = scores
    return size.tokens * request.n_kv_heads * geometry.num_selected_blocks * 4 + largest


def _select_step(size: Sizes, tiles: int, cut: SelectCut, longest: int, before: int) -> int:
    """The probabilities of some tiles, their sums per block, beside the scores of the step
    ``before``; or the sort.
    """
    request, rows = size.request, tiles * cut.groups * cut.size
    columns, count = (
        select_columns(request.geometry, longest),
        request.geometry.num_select_blocks(longest),
    )
    p, hidden = rows * size.heads * columns * size.stat, tiles * cut.size * columns
    tile = rows * size.heads * request.head_dim * size.operand
    keys = tiles * cut.groups * columns * request.head_dim * size.operand
    lse, places = rows * size.heads * size.stat, 8 * tiles * (cut.size + columns)
    sums, score = rows * count * size.heads * size.stat, rows * count * size.stat
    sort = rows * count * (3 * size.stat + 9)
    if (
        count > _SMALL_SORT
    ):  # a second copy of values and int64 places, and the places it began with
        sort += rows * count * (size.stat + 16)
    gathering = hidden + places + max(2 * tile, tile + 2 * keys, tile + keys + p + 2 * lse)
    return max(before + gathering, before + p + sums, before + sums + score, sort)


def sel(request: Request) -> int:
    """K and V as blocks, and a run: gathered keys and values, scores; backward: their gradients, in
    fp32 (fp64).
    """
    size, geometry = Sizes(request), request.geometry
    block, groups, tokens = geometry.select_block_size, request.n_kv_heads, size.tokens
    if not tokens:
        return 0
    keys = geometry.num_selected_blocks * block
    count = sel_queries(
        request.n_heads, groups, keys, size.width, size.stat, size.operand, size.budget
    )
    count = min(count, tokens)
    tiles = (
        (tokens // block + size.documents)
        if request.varlen
        else size.documents * -(-size.longest // block)
    )
    laid_out = tiles * block * groups * size.width
    gathered = count * groups * keys * size.width
    scores, hidden = count * request.n_heads * keys, count * groups * keys
    own = 2 * 8 * tokens + laid_out * size.operand + gathered * size.operand + hidden
    rows = count * request.n_heads
    forward = size.outputs + own + size.attend(rows, scores)
    products = (
        size.attend_backward(rows, count * groups * keys, scores) + rows * size.width * size.narrow
    )
    d_rows = tokens * request.n_heads * request.head_dim * size.item
    d_keys = laid_out * size.stat
    rounding = laid_out // size.width * (request.head_dim + 2 * request.v_head_dim) * size.item
    backward = d_rows + d_keys + max(own + products, rounding)
    return _peak(size, forward, backward)


def win(request: Request) -> int:
    """A step of tiles; a window over the whole sequence: one causal call."""
    size, geometry, groups = Sizes(request), request.geometry, request.n_kv_heads
    tokens = size.tokens
    if not tokens:
        return 0
    d_rows = tokens * request.n_heads * request.head_dim * size.item
    if not request.varlen and geometry.window_size >= size.longest:
        return _covering_window(size, d_rows)
    cut = WinCut.of(
        geometry.window_size,
        tokens,
        size.documents,
        size.longest,
        groups,
        size.heads,
        size.stat,
        size.budget,
    )
    count = (
        tokens // cut.size + size.documents
        if request.varlen
        else size.documents * -(-size.longest // cut.size)
    )
    tiles = min(cut.tiles, count)
    units, keys = tiles * cut.groups, min(cut.window + cut.size - 1, engine.MAX_KEYS)
    rows, hidden = units * cut.size * size.heads, tiles * cut.size * keys
    scores, gathered = rows * keys, units * keys * size.width * size.operand
    parts = cut.window + cut.size - 1 > keys
    forward = (
        size.outputs
        + rows * request.head_dim * size.operand
        + gathered
        + hidden
        + size.attend(rows, scores)
    )
    forward += parts * rows * request.v_head_dim * size.stat
    tile = rows * (size.width * size.operand + 2 * size.stat)
    added = (
        units * keys * size.width
        + rows * request.head_dim
        + 2 * units * cut.size * request.head_dim
    ) * size.stat
    step = max(
        size.delta(rows),
        gathered + hidden + size.attend_backward(rows, units * keys, scores),
        added,
    )
    step += tile + parts * rows * request.head_dim * size.stat
    d_keys = tokens * groups * size.width
    rounding = d_keys * size.item if size.item != size.stat else 0
    return _peak(size, forward, d_rows + d_keys * size.stat + max(step, rounding))


def _covering_window(size: Sizes, d_rows: int) -> int:
    request = size.request
    rows, copied = size.tokens * request.n_heads, size.documents > 1
    keys = size.tokens * request.n_kv_heads * size.width
    forth, backward = _causal(
        size,
        size.documents * request.n_kv_heads,
        size.heads,
        size.longest,
        True,
        request.n_kv_heads == 1 and not copied,
    )
    inputs = copied * (rows * request.head_dim + keys) * size.item
    forward = inputs + max(forth[0], forth[1] + size.outputs)
    inputs += copied * 2 * rows * request.v_head_dim * size.item
    return _peak(
        size, forward, inputs + max(backward[0], backward[1] + d_rows + 2 * keys * size.item)
    )


def cmp(request: Request) -> int:
    """Dense: what one call of the route takes. Packed, lengths are not told: a bound, of one
    document of all tokens.
    """
    size = Sizes(request)
    if not request.geometry.num_compressed(size.longest):
        return 0 if not size.tokens else _peak(size, size.outputs, 0)
    if not cudnn.takes(
        size.dtype,
        request.device,
        request.capability,
        (request.head_dim, request.v_head_dim),
        size.longest,
        1 if request.varlen else size.documents,
        1.0,
        request.deterministic,
    ):
        return _folded(size, size.longest)
    # Packed, the longest document that cuDNN leaves to the other route may take more.
    return max(_cudnn(size), _folded(size, cudnn.LEAST_TOKENS - 1) if request.varlen else 0)


def _folded(size: Sizes, longest: int) -> int:
    """q, o, do and lse folded, and one causal call with as many rows as compressed tokens."""
    request, geometry = size.request, size.request.geometry
    runs, rows = geometry.num_compressed(longest), 1 if request.varlen else size.documents
    folded = rows * runs * geometry.compress_stride * request.n_heads
    heads = geometry.compress_stride * size.heads
    keys = size.compressed * request.n_kv_heads * size.width * size.item
    copies = keys if rows > 1 else 0
    forward, backward = _causal(
        size, rows * request.n_kv_heads, heads, runs, request.deterministic, True
    )
    before = size.outputs + folded * request.head_dim * size.item + copies
    d_rows = size.tokens * request.n_heads * request.head_dim * size.item
    held = (
        d_rows
        + keys
        + copies
        + folded * ((size.width + request.v_head_dim) * size.item + size.stat)
    )
    return _peak(size, before + forward[0], held + backward[0])


def _cudnn(size: Sizes) -> int:
    """A sequence's o or gradients per residue beside the results, from the larger of its two
    calls.
    """
    request, d_k, d_v, stat = (
        size.request,
        size.request.head_dim,
        size.request.v_head_dim,
        size.stat,
    )
    parts = cudnn.parts(size.longest, request.geometry)
    rows = max((part.stop - part.start) * count * request.n_heads for part, count in parts)
    keys = max((part.stop - part.start) * count * request.n_kv_heads for part, count in parts)
    runs, several = (
        request.geometry.num_compressed(size.longest),
        not request.varlen and size.documents > 1,
    )
    results = (
        size.tokens * request.n_heads * d_k + size.compressed * request.n_kv_heads * size.width
    ) * size.item
    # made beside those of the sequence before
    sums = (1 + several) * runs * request.n_kv_heads * size.width * stat
    residues = rows * d_k * size.item + keys * size.width * size.item
    # lse, and the library's own
    inside = rows * stat + cudnn_scratch(rows, keys, size.heads, (d_k, d_v), size.item)
    adding = runs * request.n_kv_heads * max(d_k, d_v) * stat
    backward = results + sums + residues + max(inside, adding)
    return _peak(size, size.outputs + rows * (d_v * size.item + stat), backward)


def cudnn_scratch(rows: int, keys: int, heads: int, widths: tuple[int, int], item: int) -> int:
    """What cuDNN 9 holds inside a backward: dq and rowsum(do * o) in fp32; heads that share keys:
    dk, dv of each.
    """
    return rows * (widths[0] + 1) * 4 + (keys * heads * sum(widths) * item if heads > 1 else 0)


def _causal(
    size: Sizes, count: int, heads: int, length: int, deterministic: bool, by_row: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """aten.causal and aten.causal_backward: (peak, what is left in the results) of each.

    ``by_row``: the heads of a row lie together in memory, as a tile wants them.
    """
    request, item, stat = size.request, size.item, size.stat
    rows, d_k, d_v = count * heads * length, request.head_dim, request.v_head_dim
    sums = count * length * size.width * stat
    out = rows * (d_v * item + stat), rows * d_k * item + sums
    how = aten.route(size.dtype, request.device, max(d_k, d_v), request.capability)
    if how == "cpu":
        width = max(d_k, d_v)
        widened = rows * width * stat * (item != stat)
        forward = widened + rows * (width * stat + stat + d_v * item)
        return (forward, out[0]), (3 * widened + 3 * rows * width * stat, out[1])
    entries, tile_rows, keys = aten.tile_of(count, heads, length, stat, size.budget)
    tile, parts = entries * tile_rows * heads, length > keys
    scores = tile * keys
    copied = (
        size.operand
        if not by_row or size.operand != item or not (entries == 1 or tile_rows == length)
        else 0
    )
    step = size.attend_backward(tile, entries * keys, scores)
    step += tile * size.width * copied + parts * tile * d_k * stat + entries * tile_rows * keys
    blocks = out[1] + max(tile * d_v * (stat + (stat if size.narrow else 0)), step)
    if how == "tiles":
        forward = (
            out[0] + tile * d_k * copied + size.attend(tile, scores) + entries * tile_rows * keys
        )
        return (forward + parts * tile * d_v * stat, out[0]), (blocks, out[1])
    width = -(-max(d_k, d_v) // 8) * 8
    padded_q, padded_v = (width != d_k) * rows * width * item, (width != d_v) * rows * width * item
    padded_q += ((width != d_k) + (width != d_v)) * count * length * width * item
    flash = padded_q + rows * (width * item + stat), rows * (width * item + stat)
    if deterministic:
        return flash, (blocks, out[1])
    backward = padded_q + 2 * padded_v + 3 * rows * width * item
    backward += max(
        flash_accumulator(count * heads, length, width), count * length * 2 * width * stat
    )
    return flash, (backward, rows * width * item + sums)


def flash_accumulator(count: int, length: int, width: int) -> int:
    """What the CUDA flash backward holds inside: dq in fp32 and rowsum(do * o), both padded."""
    step = 32 if width <= 128 else 64
    return count * (-(-length // 128) * 128) * (-(-width // step) * step + 1) * 4
