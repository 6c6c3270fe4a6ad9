"""torch's Adam and AdamW with the fused kernels on where they can be.

The optimizer states live on the host, and there torch's fused CPU kernel is six times as fast as its default (one pass
over memory instead of a dozen); torch leaves it off unless asked. The classes are torch's own in everything else.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

__all__ = ["Adam", "AdamW", "live_optimizers"]

_FUSED_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))

_live: WeakSet[torch.optim.Optimizer] = WeakSet()
_live_lock = threading.Lock()


def live_optimizers() -> list[torch.optim.Optimizer]:
    """The instances of this module's classes that somebody still holds, in no order."""
    with _live_lock:
        return list(_live)


def _can_fuse(group: dict[str, Any]) -> bool:
    """Whether nobody chose an implementation for the group, and the fused one is right for all its parameters."""
    if any(group[choice] is not None for choice in ("fused", "foreach")):
        return False
    if group["capturable"] or group["differentiable"]:
        return False
    devices = _get_fused_kernels_supported_devices()
    return all(p.dtype in _FUSED_DTYPES and p.device.type in devices and _is_dense(p) for p in group["params"])


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    return tensor.layout is torch.strided and _like(tensor).stride() == tensor.stride()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.preserve_format)


if TYPE_CHECKING:
    _Base = torch.optim.Adam
else:
    _Base = object


class _FusedByDefault(_Base):
    """Chooses the fused implementation group by group, and keeps its kernel from misreading memory.

    torch's fused CPU kernel walks parameter, gradient and state as flat memory: with different strides (a channels-last
    weight whose gradient or restored state is contiguous) it pairs up the wrong elements without an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._register()

    def _register(self) -> None:
        with _live_lock:
            _live.add(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group is fused if it leaves `fused` and `foreach` open and its parameters allow it."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if _can_fuse(group):
            group["fused"] = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a group saved with `fused` and `foreach` open (torch's default) is fused if it can be."""
        groups = []
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):  # torch tells a mismatch
            merged = {"fused": None, "foreach": None, "capturable": False, "differentiable": False, **saved}
            fused = _can_fuse({**merged, "params": own["params"]})
            groups.append({**saved, "fused": True} if fused else saved)
        groups += state_dict["param_groups"][len(groups) :]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *lists: list[Tensor]
    ) -> Any:
        result = super()._init_group(group, params, grads, *lists)  # type: ignore[no-untyped-call]
        if group["fused"]:
            for i, p in enumerate(params):
                strides = p.stride()
                if grads[i].stride() != strides:
                    grads[i] = _like(p).copy_(grads[i])
                for name, tensors in zip(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), lists, strict=False):
                    if tensors and tensors[i].stride() != strides:
                        tensors[i] = self.state[p][name] = _like(p).copy_(tensors[i])
        return result


class Adam(_FusedByDefault, torch.optim.Adam):
    """`torch.optim.Adam` with `fused` on by default, per parameter group.

    A group stays with torch's own choice when it (or the optimizer) says `fused` or `foreach`, is `capturable` or
    `differentiable`, or has a parameter that the fused kernels cannot take (complex, float8, an unsupported device, a
    view with gaps). State dicts load both ways between this class and torch's.
    """


class AdamW(_FusedByDefault, torch.optim.AdamW):
    """`torch.optim.AdamW` with `fused` on by default, per parameter group; see `Adam`."""
