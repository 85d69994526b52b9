"""preflight: check the nodes of a job and the network between them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from pydantic import ValidationError

from tightfit.api.call import accepts_keywords
from tightfit.api.options.clusters import MAX_NODES, PreflightOptions
from tightfit.clusters.nodes import DEFAULT_PORT, NODES_VARIABLE, expand_nodes, node_prefix
from tightfit.clusters.preflight.gather import (
    PreflightReport,
    PreflightRequest,
    make_agent_command,
    run_preflight,
)
from tightfit.clusters.site import Site, read_site
from tightfit.clusters.slurm.script import allocation_command, select_nodes
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.import_path import module_words
from tightfit.core.options import list_given, repeat_options
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
    for name, value in list_given(options, ("num_nodes", "gpus_per_node")).items():
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
    num_nodes, num_gpus = options.num_nodes or DEFAULT_NUM_NODES, options.gpus_per_node or 0
    _check_available(partition or site.slurm.partition, site, num_nodes, num_gpus)
    words = repeat_options(list_given(options, ("run_with", "interface", "port", "shared")))
    preflight = [sys.executable, *module_words("tightfit", "preflight", *words, "--json")]
    command = allocation_command(
        preflight, site, partition=partition or None, num_nodes=num_nodes, gpus_per_node=num_gpus
    )
    _report(options, f"asking Slurm for {num_nodes} nodes (Ctrl-C gives up waiting)")
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
                f"Slurm gave no {num_nodes} nodes; salloc says why above.",
                remedy="tightfit hardware --on slurm    (what there is)",
            ) from error
        raise SetupError(
            f"The preflight inside the allocation ended with {done.returncode} and no report.",
            remedy="see its messages above, or name the nodes: --nodes a,b",
        ) from error


def _check_available(partition: str | None, site: Site, num_nodes: int, num_gpus: int) -> None:
    """salloc would wait for ever for nodes that do not exist."""
    try:
        inventory = probe_slurm_inventory(partition)
    except SetupError:
        return  # salloc says what is wrong with Slurm
    inventory = select_nodes(inventory, site.slurm)[0]
    fitting = [node for node in inventory.nodes if node.num_gpus >= num_gpus]
    if len(fitting) < num_nodes:
        with_gpus = f" with {num_gpus} GPUs" if num_gpus else ""
        raise UsageError(
            f"`--num-nodes {num_nodes}`: {inventory.source} has {len(fitting)}{with_gpus}.",
            remedy=f"tightfit hardware --on {inventory.source} --each    (what there is)",
        )
