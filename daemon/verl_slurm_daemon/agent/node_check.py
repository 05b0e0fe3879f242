"""Has a child process look at this node before ranks start: a driver that hangs must not hang the agent."""

import asyncio
import contextlib
import os
import signal
import sys

import msgspec

from verl_slurm.checks import Finding, bad, skipped
from verl_slurm.checks.node_look import OF_DRIVER, Order, judge_clock
from verl_slurm.config.schema import RunConfig
from verl_slurm_daemon.descendants import child_setup

# Less than the lead waits for agents. The checks take 0.2 s, and some seconds where a driver has to be
# loaded.
_PATIENCE_S = 30.0
_ENDS_S = 1.0


def order_for(config: RunConfig, places: tuple[str, ...]) -> Order:
    """Returns the checks for the child; `places`: what the lead sees."""
    health, device = config.health, config.distributed.device
    # Services beside the ranks start before them: their processes are on the job's GPUs by right.
    served = any(service.gpus and not service.nodes for service in config.services.values())
    return Order(
        gpus=health.gpu_errors and device != "cpu",
        gpus_required=device == "cuda",
        foreign_processes=health.foreign_processes and not served,
        min_free_mb=health.min_free_mb,
        places=places,
    )


async def look_at_node(
    config: RunConfig, places: tuple[str, ...], ahead_s: float | None, patience_s: float = _PATIENCE_S
) -> list[Finding]:
    """Returns the result of each check. `ahead_s`: this node's clock minus Slurm's; None: not known."""
    order = msgspec.json.encode(order_for(config, places)).decode()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "verl_slurm.checks.node_look", order),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=child_setup,
    )
    assert child.stdout is not None
    begun, last = "", b""
    found = judge_clock(ahead_s, config.health.max_clock_offset_s)
    try:
        async with asyncio.timeout(patience_s):
            async for line in child.stdout:
                last = line
                if line.startswith(b"{"):
                    begun = msgspec.json.decode(line, type=dict[str, str])["begins"]
        return found + msgspec.json.decode(last, type=list[Finding])
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with nvidia-smi
        # One that does not end is bad if it waits for a GPU's driver.
        judge = bad if begun in OF_DRIVER else skipped
        return [*found, judge(begun or "node", f"no answer in {patience_s:.0f} s")]
    except (ValueError, KeyError) as error:  # it broke, which says nothing against the node
        return [*found, skipped(begun or "node", f"the check broke: {error}")]
    finally:
        # Not for long: in the driver's uninterruptible sleep not even SIGKILL ends it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_S):
                await child.wait()
