"""`tightfit preflight`: check the nodes of a job and the network between them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping

import typer

from tightfit.api.options.clusters import MAX_NODES
from tightfit.cli.flags.clusters import PreflightFlags
from tightfit.cli.render.checkup import show_checkup
from tightfit.cli.terminal.output import show_json, write_err, write_out
from tightfit.cli.terminal.screen import heading, show
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
from tightfit.core.text import count_of, sanitize, shorten
from tightfit.core.units import render_seconds
from tightfit.hardware.slurm import probe_slurm_inventory

# A preflight as text: the findings, the verdict, and the options to go on with.


def show_preflight(report: PreflightReport) -> None:
    show_checkup(report)
    nodes = count_of(len(report.nodes), "node")
    write_out(f"{nodes} looked at in {render_seconds(report.seconds)}.\n")
    if not all(node.options for node in report.nodes):
        return
    title = "Once that is put right" if report.exit_code else "Start the job with"
    show(["", heading(title)])
    for node in report.nodes:
        command = f"tightfit train RECIPE.YAML {shlex.join(node.options)}"
        # To be copied: a line that is broken would not run.
        write_out(f"  on {sanitize(node.name)}:  {sanitize(command)}\n")


DEFAULT_NUM_NODES = 2
SALLOC_FAILED = 1
"""salloc's own code; otherwise it hands on that of the command."""


def preflight(flags: PreflightFlags) -> None:
    """Ask the nodes, tell what is wrong; the exit code tells the worst."""
    site = read_site()
    if flags.on is not None:
        _run_in_allocation(flags, site)
        return
    for name, value in (("--num-nodes", flags.num_nodes), ("--gpus-per-node", flags.gpus_per_node)):
        if value is not None:
            raise UsageError(
                f"{name} is for nodes that Slurm is asked for.",
                remedy=f"tightfit preflight --on slurm:PARTITION {name} {value}",
            )
    nodes = _read_nodes(flags, os.environ)
    request = PreflightRequest(
        nodes=nodes,
        start=make_agent_command(site, flags.run_with or node_prefix(site, os.environ)),
        port=flags.port or DEFAULT_PORT,
        interface=flags.interface or site.interface,
        shared=flags.shared or site.runs,
    )
    report = run_preflight(request, _show_result)
    if flags.as_json:
        show_json(report.model_dump(mode="json"))
    else:
        show_preflight(report)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _show_result(what: str) -> None:
    write_err(f"preflight: {sanitize(what)}\n")


def _read_nodes(flags: PreflightFlags, environ: Mapping[str, str]) -> tuple[str, ...]:
    text = flags.nodes or environ.get(NODES_VARIABLE)
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


def _run_in_allocation(flags: PreflightFlags, site: Site) -> None:
    kind, _, partition = (flags.on or "").partition(":")
    if kind != "slurm":
        raise UsageError(
            f"`--on {shorten(flags.on or '')}`: preflight takes nodes from Slurm alone.",
            remedy="--on slurm:PARTITION, or name the nodes: --nodes a,b",
        )
    if flags.nodes is not None:
        raise UsageError(
            "--nodes and --on both say which nodes.",
            remedy=f"tightfit preflight --on {flags.on} --num-nodes 2",
        )
    wanted = Allocation(
        partition=partition or None,
        num_nodes=flags.num_nodes or DEFAULT_NUM_NODES,
        gpus_per_node=flags.gpus_per_node or 0,
    )
    _refuse_hopeless(wanted, site)
    command = allocation_command(wanted, _own_command(flags), site)
    _show_result(f"asking Slurm for {wanted.num_nodes} nodes (Ctrl-C gives up waiting)")
    try:
        code = subprocess.call(command)
    except OSError as fault:
        raise SetupError(
            f"`salloc` does not start: {fault.strerror or fault}.",
            remedy="run this where Slurm's commands are, or name the nodes: --nodes a,b",
        ) from fault
    if code == SALLOC_FAILED:
        raise SetupError(
            f"Slurm gave no {wanted.num_nodes} nodes; salloc says why above.",
            remedy="tightfit hardware --on slurm    (what there is)",
        )
    if code:
        raise typer.Exit(code)


def _refuse_hopeless(wanted: Allocation, site: Site) -> None:
    """salloc would wait for ever for nodes that there are not."""
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


def _own_command(flags: PreflightFlags) -> list[str]:
    given = {
        "--run-with": flags.run_with,
        "--interface": flags.interface,
        "--port": flags.port,
        "--shared": flags.shared,
    }
    words = [word for name, value in given.items() if value for word in (name, str(value))]
    own = [sys.executable, "-m", "tightfit", "preflight", *words]
    return [*own, "--json"] if flags.as_json else own
