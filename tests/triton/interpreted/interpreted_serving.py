import functools
import torch, serving_decode as s
def test_x(monkeypatch):
    monkeypatch.setattr(s, "nsa_decode", functools.partial(s.nsa_decode, backends="triton"))
    assert s.check("cpu", torch.float32, "BLNHC") < 1
