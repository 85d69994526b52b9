"""preflight: check the nodes of a job and the network between them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from pydantic import ValidationError

from tightfit.api.call import accepts_keywords
from tightfit.api.options.clusters import MAX_NODES, PreflightOptions
from tightfit.clusters.nodes import NODES_VARIABLE, expand_nodes, node_prefix
from tightfit.clusters.preflight.gather import PreflightRequest
from tightfit.clusters.preflight.run import (
    Allocation,
    PreflightReport,
    allocation_command,
    make_agent_command,
    run_preflight,
)
from tightfit.clusters.rendezvous import DEFAULT_PORT
from tightfit.clusters.site import Site, read_site
from tightfit.clusters.slurm.resources import filter_nodes
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.text import shorten
from tightfit.hardware.slurm import probe_slurm_inventory

DEFAULT_NUM_NODES = 2
SALLOC_FAILED = 1
"""salloc's own code; otherwise it hands on that of the command."""


@accepts_keywords(PreflightOptions)
def preflight(options: PreflightOptions) -> PreflightReport:
    """Ask the nodes; the report's findings say what is wrong, and its nodes how to start a job."""
    site = read_site()
    if options.on is not None:
        return _run_in_allocation(options, site)
    for name, value in (
        ("--num-nodes", options.num_nodes),
        ("--gpus-per-node", options.gpus_per_node),
    ):
        if value is not None:
            raise UsageError(
                f"{name} is for nodes that Slurm is asked for.",
                remedy=f"tightfit preflight --on slurm:PARTITION {name} {value}",
            )
    request = PreflightRequest(
        nodes=_read_nodes(options, os.environ),
        start=make_agent_command(site, options.run_with or node_prefix(site, os.environ)),
        port=options.port or DEFAULT_PORT,
        interface=options.interface or site.interface,
        shared=options.shared or site.runs,
    )
    return run_preflight(request, lambda text: _report(options, text))


def _report(options: PreflightOptions, text: str) -> None:
    if options.progress is not None:
        options.progress(text, 0, 0)


def _read_nodes(options: PreflightOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    text = options.nodes or environ.get(NODES_VARIABLE)
    if not text:
        raise UsageError(
            "No nodes are named, and this is no Slurm job.",
            remedy="tightfit preflight --nodes a,b    or --on slurm:PARTITION --num-nodes 2",
        )
    nodes = expand_nodes(text)
    if len(nodes) > MAX_NODES:
        raise UsageError(
            f"`--nodes {shorten(text)}` names {len(nodes)} nodes; {MAX_NODES} are checked at most.",
            remedy="check a part of them, such as the nodes of one job",
        )
    return nodes


def _run_in_allocation(options: PreflightOptions, site: Site) -> PreflightReport:
    """The same preflight as a command inside `salloc`, which prints its report as JSON."""
    kind, _, partition = (options.on or "").partition(":")
    if kind != "slurm":
        raise UsageError(
            f"`--on {shorten(options.on or '')}`: preflight takes nodes from Slurm alone.",
            remedy="--on slurm:PARTITION, or name the nodes: --nodes a,b",
        )
    if options.nodes is not None:
        raise UsageError(
            "--nodes and --on both say which nodes.",
            remedy=f"tightfit preflight --on {options.on} --num-nodes 2",
        )
    wanted = Allocation(
        partition=partition or None,
        num_nodes=options.num_nodes or DEFAULT_NUM_NODES,
        gpus_per_node=options.gpus_per_node or 0,
    )
    _check_available(wanted, site)
    command = allocation_command(wanted, _own_command(options), site)
    _report(options, f"asking Slurm for {wanted.num_nodes} nodes (Ctrl-C gives up waiting)")
    try:
        # stderr is passed through: salloc says there how long it waits, and why it fails.
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    except OSError as error:
        raise SetupError(
            f"`salloc` does not start: {error.strerror or error}.",
            remedy="run this where Slurm's commands are, or name the nodes: --nodes a,b",
        ) from error
    try:
        return PreflightReport.model_validate_json(done.stdout)
    except ValidationError as error:
        if done.returncode == SALLOC_FAILED:
            raise SetupError(
                f"Slurm gave no {wanted.num_nodes} nodes; salloc says why above.",
                remedy="tightfit hardware --on slurm    (what there is)",
            ) from error
        raise SetupError(
            f"The preflight inside the allocation ended with {done.returncode} and no report.",
            remedy="see its messages above, or name the nodes: --nodes a,b",
        ) from error


def _check_available(wanted: Allocation, site: Site) -> None:
    """salloc would wait for ever for nodes that do not exist."""
    try:
        inventory = probe_slurm_inventory(wanted.partition or site.slurm.partition)
    except SetupError:
        return  # salloc says what is wrong with Slurm
    inventory = filter_nodes(inventory, site.slurm.constraint)
    fitting = [node for node in inventory.nodes if node.num_gpus >= wanted.gpus_per_node]
    if len(fitting) < wanted.num_nodes:
        with_gpus = f" with {wanted.gpus_per_node} GPUs" if wanted.gpus_per_node else ""
        raise UsageError(
            f"`--num-nodes {wanted.num_nodes}`: {inventory.source} has {len(fitting)}{with_gpus}.",
            remedy=f"tightfit hardware --on {inventory.source} --each    (what there is)",
        )


def _own_command(options: PreflightOptions) -> list[str]:
    given = {
        "--run-with": options.run_with,
        "--interface": options.interface,
        "--port": options.port,
        "--shared": options.shared,
    }
    words = [word for name, value in given.items() if value for word in (name, str(value))]
    return [sys.executable, "-m", "tightfit", "preflight", *words, "--json"]
