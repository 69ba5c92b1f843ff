"""The optimizer's step: clip, apply, measure.

masters, gradients       `Policy`, or shards of them: `ShardedPolicy`
moments                  `ParameterOptimizer`: AdamW, Muon
learning rate            `lr_scale`
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hone.checkpoint.sharded import StoredTensor, local_part
from hone.observe.metrics import Last, Mean, Metrics
from hone.trainer.policy import BasePolicy
from hone.trainer.schedule import lr_scale
from hone.trainer.settings import OptimizerConfig
from hone.trainer.update_rules import ParameterOptimizer

__all__ = ["Optimizer"]


class Optimizer:
    """Updates the masters of a policy with its accumulated gradient."""

    def __init__(
        self,
        policy: BasePolicy,
        cfg: OptimizerConfig,
        *,
        total_steps: int,
        offload: bool = False,
    ) -> None:
        """`total_steps` is the length of the learning-rate schedule. `offload` keeps moments in
        pinned host memory. Raises as `ParameterOptimizer`."""
        self.num_steps = 0
        """Steps done."""
        self._policy = policy
        self._cfg = cfg
        self._total_steps = total_steps
        self._rule = ParameterOptimizer(
            policy.masters,
            cfg,
            policy.embedding_names,
            device=policy.device,
            offload=offload,
            gradients_on_host=policy.gradients_on_host,
            write_back=policy.write_back if policy.masters_on_host else None,
        )

    def step(self, norm: Tensor) -> Metrics:
        """Clip the gradient, whose global norm is `norm`, apply it and drop it.

        Raises NonFiniteError where a moved weight is not finite.
        """
        policy, max_norm = self._policy, self._cfg.max_grad_norm
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else None
        scale = lr_scale(self.num_steps, self._cfg, self._total_steps)
        metrics = policy.apply(lambda: self._rule.step(policy.gradients, scale, clip))
        policy.drop_gradient()
        self.num_steps += 1
        rates = {"train/lr": Last(self._cfg.lr * scale)}
        if self._cfg.name == "muon":
            rates["train/muon_lr"] = Last(self._cfg.muon_lr * scale)
        return metrics | {"train/grad_norm": Mean(norm, 1)} | rates

    def state_dict(self) -> dict[str, Tensor]:
        """Masters and moments."""
        weights = {f"weights/{n}": p.detach() for n, p in self._policy.masters.items()}
        return weights | {f"optimizer/{n}": t for n, t in self._rule.state_dict().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        """Load the state of `state_dict`, saved by any number of processes. From stored tensors
        each process reads its own parts, one tensor after the other. Raises ValueError where the
        state belongs to another model."""
        self._policy.load_masters(_with_prefix(tensors, "weights/"))
        moments = _with_prefix(tensors, "optimizer/")
        for key in list(moments):
            if key.partition("/")[2] in self._policy.elsewhere:
                del moments[key]
        self._rule.load_state_dict(moments)

    def device_tensors(self) -> list[Tensor]:
        """Masters and moments that are on the device."""
        masters = () if self._policy.masters_on_host else self._policy.masters.values()
        return [*masters, *self._rule.device_tensors()]

    def sleep(self, *, with_weights: bool = False) -> None:
        """Move masters and moments, and the module's weights if asked, to pinned host memory.
        Raises as `Policy.sleep`."""
        parameters = self._policy.parameters.values() if with_weights else ()
        weights = [local_part(parameter.detach()) for parameter in parameters]
        self._policy.sleep([*self._rule.device_tensors(), *weights])

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises as `Policy.wake`."""
        self._policy.wake()


def _with_prefix(
    tensors: Mapping[str, Tensor | StoredTensor], prefix: str
) -> dict[str, Tensor | StoredTensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
