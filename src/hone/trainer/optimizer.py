"""One step of the optimizer: clip, apply, measure.

masters, gradients       `Policy`, or shards of them: `ShardedPolicy`
moments                  `ParameterOptimizer`: AdamW, Muon
learning rate            `lr_scale`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from hone.checkpoint.sharded import StoredTensor, take
from hone.config.trainer import OptimizerConfig
from hone.observe.metrics import Last, Mean, Metrics
from hone.trainer.policy import Policy
from hone.trainer.schedule import lr_scale
from hone.trainer.sharded import ShardedPolicy
from hone.trainer.update_rules import ParameterOptimizer

__all__ = ["Optimizer"]


class Optimizer:
    """Moves the masters of a policy by the gradient that backward has left with it."""

    def __init__(
        self,
        policy: Policy | ShardedPolicy,
        cfg: OptimizerConfig,
        *,
        total_steps: int,
        offload: bool = False,
    ) -> None:
        """`total_steps` is for the schedule. `offload` keeps moments in pinned host memory. Raises
        as `ParameterOptimizer`."""
        self.num_steps = 0
        """Steps done."""
        self._policy = policy
        self._cfg = cfg
        self._total_steps = total_steps
        self._rule = ParameterOptimizer(
            policy.masters,
            cfg,
            policy.embedding_names,
            offload=offload,
            host_masters=policy.host_masters,
            host_gradients=policy.host_gradients,
        )

    def step(self, norm: Tensor) -> Metrics:
        """Clip the gradient, whose global norm is `norm`, apply it and drop it.

        Raises NonFiniteError where a moved weight is not finite.
        """
        self._policy.clip_gradient(self._cfg.max_grad_norm, norm)
        scale = lr_scale(self.num_steps, self._cfg, self._total_steps)
        metrics = self._policy.apply(lambda: self._rule.step(scale))
        self._policy.drop_gradient()
        self.num_steps += 1
        return metrics | {
            "train/grad_norm": Mean(norm, 1),
            "train/lr": Last(self._cfg.lr * scale),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Masters and moments."""
        weights = {f"weights/{n}": p.detach() for n, p in self._policy.masters.items()}
        return weights | {f"optimizer/{n}": t for n, t in self._rule.state_dict().items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        """Take over what `state_dict` gave, of whatever processes. Of what is stored each process
        reads its own parts, one tensor after the other. Raises ValueError where it belongs to
        another model."""
        self._policy.load_masters(_with_prefix(tensors, "weights/"))
        moments = _with_prefix(tensors, "optimizer/")
        self._rule.load_state_dict(_Resharded(moments, self._policy.masters))

    def sleep(self) -> None:
        """Move masters and moments to pinned host memory. Raises as `Policy.sleep`."""
        self._policy.sleep(self._rule.device_tensors())

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises as `Policy.wake`."""
        self._policy.wake()


class _Resharded(Mapping[str, Tensor]):
    """`<moment>/<parameter>` to a saved tensor, laid out as the parameter is when it is asked for:
    only one of them fits on the device beside the moments of a model."""

    def __init__(
        self, saved: Mapping[str, Tensor | StoredTensor], parameters: Mapping[str, Tensor]
    ) -> None:
        self._saved, self._parameters = saved, parameters

    def __getitem__(self, key: str) -> Tensor:
        saved, like = self._saved[key], self._parameters.get(key.partition("/")[2])
        if isinstance(saved, DTensor):
            return saved
        if isinstance(like, DTensor) and like.shape == saved.shape:
            return take(saved, like=like.detach())
        return saved.full() if isinstance(saved, StoredTensor) else saved

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def _with_prefix(
    tensors: Mapping[str, Tensor | StoredTensor], prefix: str
) -> dict[str, Tensor | StoredTensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
