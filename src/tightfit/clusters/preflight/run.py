"""A whole preflight: nodes allocated by Slurm or named, asked, judged and reported."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tightfit.clusters.preflight.gather import (
    AGENT,
    AgentCommand,
    Collector,
    PreflightRequest,
    ReportProgress,
)
from tightfit.clusters.preflight.messages import AllReduceResult, NodeFacts
from tightfit.clusters.preflight.network_findings import check_devices, check_links, check_names
from tightfit.clusters.preflight.node_findings import check_folder, check_nodes
from tightfit.clusters.preflight.observations import Observations
from tightfit.clusters.site import Site
from tightfit.core.errors import SetupError
from tightfit.core.findings import Status
from tightfit.core.frozen import Frozen
from tightfit.hardware.checkup import Checkup

SALLOC_OPTIONS = frozenset(
    {"account", "acctg-freq", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters",
     "comment", "constraint", "container", "contiguous", "core-spec", "cores-per-socket",
     "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency",
     "distribution", "exclude", "exclusive", "extra-node-info", "get-user-env", "gid", "gpu-bind",
     "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres",
     "gres-flags", "hint", "hold", "job-name", "licenses", "mail-type", "mail-user", "mcs-label",
     "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "no-kill",
     "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu",
     "ntasks-per-node", "ntasks-per-socket", "overcommit", "oversubscribe", "partition", "power",
     "prefer", "priority", "profile", "qos", "quiet", "reboot", "reservation", "signal",
     "sockets-per-node", "spread-job", "switches", "thread-spec", "threads-per-core", "time",
     "time-min", "tmp", "uid", "use-min-nodes", "verbose", "wait-all-nodes", "wckey"}
)  # fmt: skip
"""Long names that mean the same to sbatch. Source: salloc(1) and sbatch(1) of Slurm 22.05."""
SALLOC_LETTERS = frozenset("ABCDFGHJLMNOQScdkmnpqstvwx")


def keep_salloc_options(lines: Sequence[str]) -> list[str]:
    """The words for salloc; options that only a batch script has (`--requeue`) are left out."""
    options = [option for line in lines for option in _split_options(line)]
    return [word for option in options if _is_salloc_option(option) for word in option]


def _split_options(line: str) -> Iterator[list[str]]:
    """Each option of a line with the words that are its value."""
    option: list[str] = []
    for word in shlex.split(line, comments=True):
        if word.startswith("-") and option:
            yield option
            option = []
        option.append(word)
    if option:
        yield option


def _is_salloc_option(option: Sequence[str]) -> bool:
    name = option[0]
    if name.startswith("--"):
        return name[2:].partition("=")[0] in SALLOC_OPTIONS
    return name[1:2] in SALLOC_LETTERS


# A preflight inside an allocation of its own: the words for `salloc`.

MINUTES = 3
"""The checks take less than one; the rest is for srun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Nodes to be had from Slurm for a few minutes."""

    partition: str | None
    num_nodes: int
    gpus_per_node: int = 0


def allocation_command(wanted: Allocation, words: Sequence[str], site: Site) -> list[str]:
    """`salloc ... words`: it runs them here, with the nodes' names in the environment.

    The site's raw options come first: of two that say the same salloc goes by the last.
    """
    slurm = site.slurm
    given = {
        "--job-name": "tightfit-preflight",
        "--partition": wanted.partition or slurm.partition,
        "--nodes": str(wanted.num_nodes),
        "--ntasks-per-node": "1",
        "--time": str(MINUTES),
        "--gpus-per-node": str(wanted.gpus_per_node) if wanted.gpus_per_node else None,
        "--account": slurm.account,
        "--qos": slurm.qos,
        "--constraint": slurm.constraint,
        "--reservation": slurm.reservation,
    }
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    return ["salloc", *keep_salloc_options(slurm.extra), *options, *words]


# The verdict of a preflight, with the figures and the options that the job is to be given.


class NodeReport(Frozen):
    """One node, and how `tightfit train` is to be started there."""

    name: str
    address: str | None
    interface: str | None
    clock_offset_seconds: float | None
    """Ahead of the machine that asked."""
    facts: NodeFacts | None
    options: tuple[str, ...]
    """Empty where the nodes cannot meet."""


class LinkReport(Frozen):
    """One direction between two nodes. None: not measured."""

    source: str
    target: str
    outcome: str
    rtt_seconds: float | None
    lost_fraction: float | None
    bytes_per_second: float | None
    resent_fraction: float | None


class PreflightReport(Checkup):
    """What was found, and what to do with it."""

    seconds: float
    nodes: tuple[NodeReport, ...]
    links: tuple[LinkReport, ...]
    all_reduce: AllReduceResult | None


def make_preflight_report(observed: Observations) -> PreflightReport:
    findings = (
        *check_nodes(observed),
        *check_names(observed),
        *check_devices(observed),
        *check_links(observed),
        *check_folder(observed),
    )
    worst = max((f.status for f in findings), key=list(Status).index, default=Status.OK)
    return PreflightReport(
        findings=findings,
        worst=worst,
        exit_code=SetupError.exit_code if worst is Status.FAULT else 0,
        seconds=observed.seconds,
        nodes=tuple(_report_node(observed, rank, node) for rank, node in enumerate(observed.nodes)),
        links=_report_links(observed),
        all_reduce=observed.reduce,
    )


def _report_node(observed: Observations, rank: int, node: str) -> NodeReport:
    node_address = observed.addresses.get(node)
    clock = observed.clocks.get(node)
    return NodeReport(
        name=node,
        address=node_address.address if node_address else None,
        interface=node_address.device if node_address else None,
        clock_offset_seconds=clock.offset_seconds if clock else None,
        facts=observed.facts.get(node),
        options=_train_options(observed, rank, node),
    )


def _train_options(observed: Observations, rank: int, node: str) -> tuple[str, ...]:
    """Everything torchrun would guess, said: names, addresses and devices do not matter then."""
    if len(observed.addresses) < len(observed.nodes) or len(observed.nodes) == 1:
        return ()
    return (
        "--nodes", str(len(observed.nodes)),
        "--rendezvous", f"{observed.addresses[observed.head].address}:{observed.port}",
        "--node-rank", str(rank),
        "--local-addr", observed.addresses[node].address,
        "--interface", observed.addresses[node].device,
    )  # fmt: skip


def _report_links(observed: Observations) -> tuple[LinkReport, ...]:
    found = []
    for (source, target), probe in observed.probes.items():
        stream = observed.streams.get((source, target))
        found.append(
            LinkReport(
                source=source,
                target=target,
                outcome=probe.outcome.value,
                rtt_seconds=probe.rtt_seconds,
                lost_fraction=observed.lost_fraction((source, target)),
                bytes_per_second=stream.bytes_per_second if stream else None,
                resent_fraction=stream.resent_fraction if stream else None,
            )
        )
    return tuple(found)


# A whole preflight: ask the nodes, judge, report.

DROPPED_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
"""A job's own, which torch would follow in place of what it is told."""


def make_agent_command(site: Site, prefix: str) -> AgentCommand:
    """The agent's command as the site starts everything: set-up lines first, then its Python."""
    argv = (*_container(site), site.interpreter, "-m", AGENT)
    unset = [word for name in DROPPED_VARIABLES for word in ("-u", name)]
    if site.setup:
        lines = "\n".join([*site.setup, f"exec {shlex.join(argv)}"])
        argv = ("bash", "-c", lines)
    if site.container_image is not None and prefix.startswith("srun "):
        prefix = f"{prefix} --container-image={shlex.quote(site.container_image)}"
    return AgentCommand(prefix=prefix, argv=("env", *unset, *argv), env=site.environment)


def _container(site: Site) -> list[str]:
    """Words before the command; an image alone is srun's to start (Pyxis)."""
    return shlex.split(site.container) if site.container and not site.container_image else []


def run_preflight(request: PreflightRequest, tell: ReportProgress) -> PreflightReport:
    """In less than a minute, whatever is wrong."""
    return make_preflight_report(Collector(request, tell).run())
