"""Faults in nsa_decode, which the histories of pages must find."""

from __future__ import annotations

from cache_faults import CacheFault
from nsa_backend_sdpa import decode as sdpa_decode
from nsa_core import contract
from nsa_core.decode import api, pages, run

FAULTS = [
    CacheFault(
        "a table does not wrap around",
        pages.PagedKV,
        "locate",
        "tokens // self.rows % table.shape[1]",
        "(tokens // self.rows).clamp(max=table.shape[1] - 1)",
    ),
    CacheFault(
        "rows without a token are written",
        pages.PagedKV,
        "write",
        "if absent is None:",
        "if True:",
    ),
    CacheFault(
        "a row without a token repeats the write of another one",
        pages.PagedKV,
        "write",
        "flat.to(torch.uint8).argmin()",
        "flat.to(torch.uint8).argmax()",
    ),
    CacheFault(
        "a step that completes no block writes one",
        pages.PagedKV,
        "write",
        "torch.where(none, as_bytes(store)[page, row], codes)",
        "codes",
    ),
    CacheFault(
        "values go to the rows of the keys before",
        pages.PagedKV,
        "write",
        "row.flatten()[source]",
        "row.flatten()[source].sub_(1).clamp_(min=0)",
    ),
    CacheFault(
        "the first row of a sequence belongs to the one before",
        api,
        "decode_rows",
        "right=True",
        "right=False",
    ),
    CacheFault(
        "every row counts as a token",
        api,
        "decode_rows",
        "starts + ~absent",
        "starts + 1",
    ),
    CacheFault(
        "the positions are those after the step",
        api,
        "decode_rows",
        "(lengths - ends)[sequences] + row",
        "(lengths - ends)[sequences] + row + 1",
    ),
    CacheFault(
        "the output of a row without a token is not zero",
        api,
        "decode",
        "(rows.lengths == rows.starts)[:, None, None]",
        "(rows.lengths < rows.starts)[:, None, None]",
    ),
    CacheFault(
        "phi reads the tokens of another sequence",
        run,
        "compress",
        "raw.read(starts[:, :1] + count, call.sequences)",
        "raw.read(starts[:, :1] + count, call.sequences * 0)",
    ),
    CacheFault(
        "compressed tokens go to the pages of another sequence",
        run,
        "compress",
        "incomplete, call.sequences)",
        "incomplete, call.sequences * 0)",
    ),
    CacheFault(
        "win is written to the pages of raw",
        run,
        "append",
        "(pages.win, win))",
        "(pages.raw, win))",
    ),
    CacheFault(
        "decode forms read the table of the row's number",
        contract.DecodeCall,
        "table",
        "self.sequences.clamp(0, len(table) - 1)",
        "self.starts.new_tensor(range(len(self.starts))).clamp_(max=len(table) - 1)",
    ),
    CacheFault(
        "every page is written with the scales of page 0",
        pages.PagedKV,
        "_codes",
        "self.scales[page]",
        "self.scales[page * 0]",
    ),
    CacheFault(
        "values are written with the scales of keys",
        pages.PagedKV,
        "_codes",
        "[..., i]",
        "[..., 0]",
    ),
    CacheFault(
        "codes are not rounded to the nearest",
        pages,
        "quantize",
        "codes.round_()",
        "codes.trunc_()",
    ),
    CacheFault(
        "large tokens do not saturate",
        pages,
        "quantize",
        ".clamp_(-limit, limit)",
        "",
    ),
    CacheFault(
        "compressed values are read with the scales of keys",
        sdpa_decode,
        "_scales",
        "return k, v",
        "return k, k",
    ),
    CacheFault(
        "selected keys are read with the scales of page 0",
        sdpa_decode,
        "sel",
        "call.scales.sel[page, group, None]",
        "call.scales.sel[page * 0, group, None]",
    ),
    CacheFault(
        "a chunk lacks the oldest token of its window",
        run,
        "attend_chunk",
        "start - geometry.window_size + 1",
        "start - geometry.window_size + 2",
    ),
    CacheFault(
        "a chunk reads the pages of another sequence",
        run,
        "attend_chunk",
        "torch.arange(sequences.start, sequences.stop, device=q.device)",
        "torch.arange(sequences.stop - sequences.start, device=q.device)",
    ),
    CacheFault(
        "a chunk completes no block",
        run,
        "_runs",
        "call.lengths[last]",
        "call.lengths[first]",
    ),
    CacheFault(
        "a chunk completes one block at most",
        api,
        "decode",
        "chunk.rows if chunk else 1",
        "1",
    ),
]
