"""Rungs of the ladder that several checks' remedies share.  Values only."""

from __future__ import annotations

from gpufleet.checks.finding import Action, Step

SEE_LOG = Step(Action.LOOK, "`dmesg | grep -E 'NVRM|Xid' | tail -30` on the node")
STOP = Step(Action.DRAIN, "stop what uses the GPUs: `systemctl stop 'vllm-*'`")
REBOOT_IT = Step(Action.REBOOT, "`reboot`")
POWER_CYCLE = Step(
    Action.POWER_CYCLE, "power off and on over the BMC: through a reboot GPUs keep their power"
)
RETURN_IT = Step(
    Action.SERVICE, "it comes back after that: `nvidia-bug-report.sh`, have the GPU exchanged"
)


def reset(index: int) -> Step:
    """Return the rung that resets a GPU. GPUs that share NVSwitches are reset all at once."""
    return Step(
        Action.RESET_GPU,
        f"`nvidia-smi -r -i {index}`; behind NVSwitches all at once: `nvidia-smi -r`",
    )
