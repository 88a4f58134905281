"""AdamW over the fp32 masters of a decoder; its state goes in and out as plain tensors."""

from __future__ import annotations

import math

import torch

from zerogap.config import Learner as LearnerConfig
from zerogap.learner.schedule import learning_rate
from zerogap.model.decoder import Decoder

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class MasterOptimizer:
    """Owns the moments and the rate. Weight decay acts on matrices, not on norm and bias vectors.

    total: updates of the whole run, for the schedule.
    """

    def __init__(self, decoder: Decoder, config: LearnerConfig, total: int) -> None:
        self.decoder = decoder
        self.config = config
        self.total = total
        self.masters: dict[str, torch.Tensor] = {}
        for name, weight in decoder.weights.items():
            if weight.master is None:
                raise ValueError(f"weight {name} has no fp32 master; load the decoder with trainable=True")
            self.masters[name] = weight.master
        matrices = [master for master in self.masters.values() if master.ndim > 1]
        vectors = [master for master in self.masters.values() if master.ndim == 1]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )
        # Made now and not by the first step, so that a checkpoint before it is complete too.
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }

    def clear_gradients(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def scale_gradients(self, factor: float) -> None:
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor)

    def gradient_norm(self) -> float:
        """L2 norm over all gradients; not finite when any of them is not."""
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        return math.sqrt(sum(float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in gradients))

    def apply(self, step: int) -> float:
        """Update `step` (0, 1, ...) from the gradients held; they are then freed. Returns the learning rate used."""
        rate = learning_rate(step, self.config, self.total)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.clear_gradients()
        self.decoder.refresh()
        return rate

    def state(self) -> dict[str, torch.Tensor]:
        """`<weight>.master`, `.exp_avg`, `.exp_avg_sq` (fp32) and `.step` (fp32 scalar). Live tensors, not copies:
        write them out before the next update."""
        tensors: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            tensors[f"{name}.master"] = master.detach()
            for moment in MOMENTS:
                tensors[f"{name}.{moment}"] = self.adamw.state[master][moment]
        return tensors

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of `state`. Names, shapes and dtypes are checked first; ValueError leaves everything as it was."""
        own = self.state()
        missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        if missing or unknown:
            raise ValueError(
                f"optimizer state does not fit this model: missing {missing[:3]} ({len(missing)} in all), "
                f"unknown {unknown[:3]} ({len(unknown)} in all); resume with the model that the run began with"
            )
        for name, target in own.items():
            source = tensors[name]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise ValueError(
                    f"optimizer state {name} is {source.dtype} {list(source.shape)}, this model needs "
                    f"{target.dtype} {list(target.shape)}; resume with the model that the run began with"
                )
        for name, target in own.items():
            target.copy_(tensors[name])
        self.decoder.refresh()
