"""Pictures of the selection: which blocks each query reads, its gates, and what it leaves out."""

from nsa_models.inspect.collect import Inspection, LayerInspection, inspect_model
from nsa_models.inspect.save import save
from nsa_models.inspect.subject import Subject, inspect_text, open_subject

__all__ = [
    "Inspection",
    "LayerInspection",
    "Subject",
    "inspect_model",
    "inspect_text",
    "open_subject",
    "save",
]
