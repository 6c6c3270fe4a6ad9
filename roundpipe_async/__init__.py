"""An asyncio-native training engine for PyTorch models larger than a device.

Parameters, gradients and optimizer state live in host memory; devices are a pool of stateless workers through which
stages of layers and microbatches flow. See `RoundPipe`, and the README for a tour.
"""

from roundpipe_async import optim
from roundpipe_async.config import RoundPipeRunConfig
from roundpipe_async.data import prefetch
from roundpipe_async.devices.pool import DevicePool
from roundpipe_async.errors import (
    ClosedError,
    MicrobatchError,
    PlanError,
    RoundPipeError,
    ScheduleError,
    StepError,
    WrongLoopError,
)
from roundpipe_async.model import RoundPipe
from roundpipe_async.modes import no_grad
from roundpipe_async.optimizer import OptimizerCtx
from roundpipe_async.recompute import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe_async.scaling.grad_scaler import GradScaler
from roundpipe_async.scaling.state import SkippedStepsError
from roundpipe_async.scheduling.plan import ModelExecutePlan
from roundpipe_async.tracing.trace import trace
from roundpipe_async.wrap import wrap_model_to_roundpipe

__all__ = [
    "ClosedError",
    "DevicePool",
    "GradScaler",
    "MicrobatchError",
    "ModelExecutePlan",
    "OptimizerCtx",
    "PlanError",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipeRunConfig",
    "ScheduleError",
    "SkippedStepsError",
    "StepError",
    "WrongLoopError",
    "doing_recompute",
    "get_recompute_data",
    "no_grad",
    "optim",
    "prefetch",
    "save_for_recompute",
    "trace",
    "wrap_model_to_roundpipe",
]
