"""Causes of a KERNEL gap that lie in precision: the engine, its weights or the head in bf16.

Each is one function of the case; None where it explains too little. A few tensors in bf16: mixture.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerogap.gaps.audit.finding import Finding
from zerogap.gaps.audit.sample import Case, Tensors
from zerogap.kernels import Weight
from zerogap.model.decoder import Decoder


def engine_in_bf16(case: Case) -> Finding | None:
    """Weights and activations were bf16, with or without the logits; those of the audit are fp32."""
    if case.model.dtype == torch.bfloat16:
        return None
    tensors = {name: weight.data.bfloat16() for name, weight in case.model.weights.items()}
    models = {"engine in bf16": _Bf16Head(case.model, tensors, product=False, logits=False)}
    models["engine in bf16, logits too"] = _Bf16Head(case.model, tensors, product=False, logits=True)
    return _best(case, models)


def head_in_bf16(case: Case) -> Finding | None:
    """The head's product, its logits or both were bf16. In a bf16 model only the logits can be what is too narrow."""
    tensors = {name: weight.data for name, weight in case.model.weights.items()}
    models = {"logits rounded to bf16": _Bf16Head(case.model, tensors, product=False, logits=True)}
    if case.model.dtype != torch.bfloat16:
        models["head in bf16, fp32 logits"] = _Bf16Head(case.model, tensors, product=True, logits=False)
        models["head in bf16, logits too"] = _Bf16Head(case.model, tensors, product=True, logits=True)
    return _best(case, models)


def weights_in_bf16(case: Case) -> Finding | None:
    """Weights went through bf16 on their way to an engine that computes in fp32."""
    if case.model.dtype == torch.bfloat16:
        return None
    return case.tried_model("weights narrowed to bf16", case.model.view(narrowed(case.model)))


def narrowed(model: Decoder) -> dict[str, torch.Tensor]:
    """Its tensors after a way through bf16."""
    return {name: weight.data.bfloat16().to(model.dtype) for name, weight in model.weights.items()}


class _Bf16Head(Decoder):
    """A model on other tensors. product: the head multiplies in bf16. logits: they are rounded to bf16."""

    def __init__(self, model: Decoder, tensors: Tensors, product: bool, logits: bool) -> None:
        weights = {name: Weight(tensor) for name, tensor in tensors.items()}
        rotary = (model.cos_PR, model.sin_PR)
        super().__init__(model.config, model.kernels, weights, model.vocab, model.eos_token_ids, rotary)
        self._rounded = logits
        self._dtype = torch.bfloat16 if product else self.dtype
        self.head = Weight(self.head.data.to(self._dtype))

    def logprobs(self, hidden_TH: torch.Tensor, targets_T: torch.Tensor, temperature: float) -> torch.Tensor:
        hidden_TH = hidden_TH.to(self._dtype)
        if not self._rounded:
            return super().logprobs(hidden_TH, targets_T, temperature)
        logits_TV = self.logits(hidden_TH)[:, : self.vocab].bfloat16().float() / temperature
        return logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]


def _best(case: Case, models: Mapping[str, Decoder]) -> Finding | None:
    findings = [case.tried_model(cause, model) for cause, model in models.items()]
    return max(filter(None, findings), key=lambda finding: finding.explained, default=None)
