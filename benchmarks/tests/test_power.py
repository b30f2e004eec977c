"""benchmarks/kernels/power.py reads the clock and the power that nvidia-smi prints."""

from __future__ import annotations

import power
import pytest


def test_incomplete_lines_of_nvidia_smi_do_not_count():
    report = "1980, 119.21\n1575, 706.00\n[N/A], 700.00\n1305, \n13"
    assert power.samples(report) == [(1980.0, 119.21), (1575.0, 706.0)]


def test_a_case_without_a_length_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("sys.argv", ["power.py", "64/4/128"])
    with pytest.raises(SystemExit):
        power.main()
    assert "'64/4/128' is not of the form SHAPE@LENGTH, such as 64/4/128@32768" in (
        capsys.readouterr().err
    )
