"""Defines the command ``rekindle run``."""

from __future__ import annotations

import sys
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from rekindle.launch.torchrun import launch

__all__ = ["run_command"]

_OPTIONS = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


@click.command(
    "run",
    context_settings=_OPTIONS,
    options_metavar="[OPTIONS]",
    short_help="Train: torchrun, set up so that ranks are started again.",
)
@click.argument(
    "arguments",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SCRIPT [ARGUMENTS]...",
    shell_complete=lambda _ctx, _param, incomplete: [CompletionItem(incomplete, type="file")],
)
@click.pass_context
def run_command(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Train: start SCRIPT once for each rank, and all ranks again when one fails.

    \b
      rekindle run --nproc-per-node 8 train.py --lr 1e-3
      rekindle run --nnodes 4 --nproc-per-node 8 \\
          --rdzv-endpoint HOST:29400 --rdzv-id JOB train.py

    This is torchrun, set up so that restarts work, and less talkative. It has all of torchrun's options. Those that are
    used most, with those of its own:

    \b
      --nproc-per-node N    ranks on each node; 1 if unset
      --nnodes N            nodes; 1 if unset. Further ones that are started
                            wait, and take the place of a lost one
      --nnodes MIN:MAX      as many nodes as there are
      --rdzv-endpoint HOST:PORT[,HOST:PORT] --rdzv-id JOB
                            where nodes find each other: one or some of them,
                            and a port
      --max-restarts N      restarts without progress after which the job is
                            given up; 20 if unset (torchrun: 0)
      --count-restarts job  count them over the life of the job, as torchrun
      --same-error-limit N  starts in a row with the same error at the same
                            step that end the job; 3 if unset, 0 for no limit
      --restart-pause SECONDS
                            longest pause before a restart; 60 if unset
      --retry-refused       start again after errors that each start would
                            meet: a state that doesn't fit, usage
      --compile-cache ROOT  keep what is compiled in memory, and with the
                            checkpoints in ROOT: restarts compile nothing
      -m                    SCRIPT is a module's name
      --no-warm             start ranks anew after a failure, rather than from a
                            process that has loaded what they import
      --provide NAME[,NAME] let SCRIPT import Rekindle's stand-ins for
                            mindio_acp, mindio_ttp, torch_nebula;
                            REKINDLE_PROVIDE if unset

    'python -m torch.distributed.run --help' lists all of torchrun's.

    Several nodes: start the same command on each. They meet by Rekindle's own rendezvous, --rdzv-backend rekindle if
    unset. Any node may be lost, also that of HOST: it is given up at once if its connections are closed, else after
    3 s. A spare takes its place 1 s later; nodes that start after the loss of HOST need another endpoint, which is
    printed.

    Restarts: when a rank ends with an exit code other than 0, or is killed, the others are told to go (SIGTERM, SIGKILL
    30 s later) and all are started again. A script that calls ckpt.restore() then goes on from the newest step that
    all ranks have. A step that is newer than all before gives all restarts back; without steps, a file that
    rekindle.save has put at a new path. Without progress the second restart in a row waits for 1 s, the next for 2 s,
    and so on. A script that can't be opened is an error at once.

    Set where they aren't: TORCH_NCCL_ASYNC_ERROR_HANDLING=0 and TORCH_NCCL_RETHROW_CUDA_ERRORS=0, so that torch ends
    no rank whose state is being secured; with torchrun's own rendezvous TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; and, as
    by torchrun, OMP_NUM_THREADS=1 for several ranks on a node. LOGLEVEL=INFO or WARNING shows torchrun's own log.

    Exit code 0 when all ranks have ended with 0, or this node was a spare to the end, 1 when no restarts are left, the
    same error came again, another node has given the job up, HOST is not reached or too few nodes come, 2 when there is
    nothing to run or a usage error ended a rank, 5 when the state doesn't fit, 7 when another process trains the root
    (nothing is started again then), 128 and the number of the signal that told it to go (130 for Ctrl-C).
    """
    sys.exit(launch(list(arguments), ctx.get_help, _say))


def _say(line: str) -> None:
    """Writes a line for people. One that can't be written, as its reader has gone or a disk is full, ends no job."""
    with suppress(OSError):
        click.echo(f"rekindle: {line}", err=True)
