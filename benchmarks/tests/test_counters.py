"""benchmarks/kernels/counters.py reads the CSV report of Nsight Compute."""

from __future__ import annotations

import counters
import pytest

HEAD = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def report(*kernels):
    """A report of launches, each (kernel, ns)."""
    names = counters.METRICS
    lines = ["==PROF== Connected to process 1", HEAD]
    for number, (kernel, ns) in enumerate(kernels):
        lines.append(f'"{number}","{kernel}","{names["ms"]}","ns","{ns:,}"')
        lines.append(f'"{number}","{kernel}","{names["l2_percent"]}","%","{number}.5"')
        lines.append(f'"{number}","{kernel}","unknown","%","7"')
    return "\n".join(lines)


def test_the_last_pass_counts_and_names_the_branches():
    kernels = ["span_forward", "select_forward", "span_forward"]
    first = [(kernel, 9_000_000) for kernel in kernels]
    last = [("span_forward", 2_500_000), ("select_forward", 1_250), ("span_forward", 3_000_000)]
    found = counters.launches(report(*first, *last))
    assert found == [
        {"kernel": "span_forward", "ms": 2.5, "l2_percent": 3.5, "branch": "cmp"},
        {"kernel": "select_forward", "ms": 0.00125, "l2_percent": 4.5, "branch": ""},
        {"kernel": "span_forward", "ms": 3.0, "l2_percent": 5.5, "branch": "win"},
    ]


def test_passes_that_differ_are_refused():
    """The second pass ended early."""
    kernels = [("span_forward", 1), ("span_dq", 1), ("span_forward", 1)]
    with pytest.raises(ValueError, match="the passes differ"):
        counters.launches(report(*kernels))


def test_a_report_without_counters_is_refused_with_its_last_line():
    with pytest.raises(ValueError, match=r"no counters: .*insufficient permissions"):
        counters.launches("==ERROR== an error\n==ERROR== insufficient permissions\n")
