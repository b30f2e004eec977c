"""A checkpoint of `nsa train`, as the lm-evaluation-harness calls models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from nsa_core.errors import InvalidInput
from nsa_models.lm import checkpoint as checkpoints
from nsa_models.lm.generate import generate

NEW_TOKENS = 256  # the harness's default


class TrainedModel(TemplateLM):  # type: ignore[misc]
    """A language model of :mod:`nsa_models.lm`; each text begins with the token between documents.

    Args:
        path: The checkpoint, or the folder of its run.
        max_length: Tokens of the longest text; longer ones lose their beginning. Default: the
            length of the rows of the training.
        batch: Texts per forward.
        dtype: Dtype of the parameters, or "auto": that of the checkpoint.
        device: A device of torch.
        backends: As in :class:`nsa_core.NSAttention`.

    Raises:
        InvalidInput: The checkpoint cannot be read, or is not of text.
    """

    def __init__(
        self,
        path: Path,
        max_length: int | None = None,
        batch: int = 1,
        dtype: str = "auto",
        device: str = "cpu",
        backends: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        saved = checkpoints.read(path)
        tokenizer = saved.load_tokenizer()
        if tokenizer is None:
            raise InvalidInput(
                f"checkpoint {saved.path} was trained on the task {saved.facts['data']['data']}: it"
                " has no text; give the checkpoint of a run on text"
            )
        self.text_tokens = tokenizer
        self.max_length = max_length or int(saved.facts["data"]["length"])
        self.batch = batch
        model = saved.model(backends).to(device).eval()
        self.model = model if dtype == "auto" else model.to(getattr(torch, dtype))

    @property
    def eot_token_id(self) -> int:
        """Return the token before and after each document."""
        return self.text_tokens.end

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, after the token between documents unless refused."""
        ids = self.text_tokens.encode(string)
        return ids if add_special_tokens is False else [self.text_tokens.end, *ids]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return, for each (_, context, continuation), its log-probability and if it is greedy."""
        results = []
        device = self.model.embed.weight.device
        for start in range(0, len(requests), self.batch):
            part = [request[1:] for request in requests[start : start + self.batch]]
            rows = [
                torch.tensor([*context, *continuation][-self.max_length - 1 :])
                for context, continuation in part
            ]
            inputs = pad_sequence([row[:-1] for row in rows], batch_first=True).to(device)
            for hidden, row, (_context, continuation) in zip(self.model.hidden(inputs), rows, part):
                targets = row[1:].to(device)[-len(continuation) :]
                last = hidden[: len(row) - 1][-len(continuation) :]
                logits = linear(last, self.model.embed.weight).float()
                scores = logits.log_softmax(-1).gather(1, targets[:, None])
                greedy = bool((logits.argmax(-1) == targets).all())
                results.append((float(scores.sum()), greedy))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log-probability of each whole text, in windows of ``max_length``."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False),
                self.eot_token_id,
                self.max_length,
                1,
            )
            parts = [("", *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Return a continuation of each text, up to the first of its stop strings."""
        texts = []
        for request in requests:
            context, options = request.args
            count = min(int(options.get("max_gen_toks", NEW_TOKENS)), self.max_length - 1)
            ids = self.tok_encode(context)[-(self.max_length - count) :]
            new = generate(
                self.model,
                torch.tensor([ids], device=self.model.embed.weight.device),
                count,
                temperature=options.get("temperature", 0.0) if options.get("do_sample") else 0.0,
                end=self.text_tokens.end,
            )
            text = self.text_tokens.decode(new[0].tolist())
            stops = options.get("until") or []
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.split(stop)[0] if stop else text
            texts.append(text)
        return texts
