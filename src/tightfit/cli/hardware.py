"""`tightfit hardware`: search the GPU catalogue, show one card with sources, or read a cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

from tightfit.cli.flags.hardware import HardwareFlags
from tightfit.cli.terminal.json_output import show_json
from tightfit.core.errors import EnvironmentFaultError, NotFoundError, UsageError
from tightfit.hardware.catalogue import describe_gpu, list_gpus, match_gpu, search_gpus
from tightfit.hardware.inventory import (
    ClusterNode,
    Inventory,
    InventoryRow,
    count_totals,
    list_rows,
)
from tightfit.hardware.resolve import probe_inventory, resolve_hardware
from tightfit.hardware.types import Cluster, Gpu


def hardware(flags: HardwareFlags) -> None:
    """Show the catalogue, one card, or what `--on` means."""
    if flags.each and flags.on is None:
        raise UsageError(
            "--each lists the nodes of a cluster.", remedy="tightfit hardware --on slurm --each"
        )
    if flags.on is not None:
        if flags.name is not None:
            raise UsageError(
                "A GPU name and --on ask for two different things.",
                remedy=f"tightfit hardware {flags.name}, or tightfit hardware --on {flags.on}",
            )
        _show_cluster(flags, flags.on)
    elif flags.name is None:
        _show_list(list_gpus(), as_json=flags.as_json)
    else:
        _search_or_show(flags.name, as_json=flags.as_json)


def _search_or_show(word: str, *, as_json: bool) -> None:
    """One card where the word names one; else all that contain it."""
    found = search_gpus(word)
    try:
        match = match_gpu(word)
    except NotFoundError:
        inside = [gpu for gpu in found if _folded(word) in _folded(gpu.name)]
        if not inside:
            raise
        _show_list(inside, as_json=as_json)
        return
    if match.others and len(found) > 1:
        _show_list(found, as_json=as_json)
    else:
        _show_gpu(match.gpu.name, as_json=as_json)


def _folded(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _show_list(gpus: list[Gpu], *, as_json: bool) -> None:
    if as_json:
        show_json({"gpus": [gpu.model_dump(mode="json") for gpu in gpus]})
        return
    from tightfit.cli.render.hardware import show_gpus

    show_gpus(gpus)


def _show_gpu(name: str, *, as_json: bool) -> None:
    record = describe_gpu(name)
    if as_json:
        show_json(
            {
                **record.gpu.model_dump(mode="json"),
                "family": record.family,
                "aliases": list(record.aliases),
                "numbers": [dataclasses.asdict(number) for number in record.numbers],
            }
        )
        return
    from tightfit.cli.render.hardware import show_gpu

    show_gpu(record)


def _show_cluster(flags: HardwareFlags, text: str) -> None:
    inventory = probe_inventory(text)
    if inventory is not None:
        _show_inventory(flags, inventory)
        return
    if flags.each:
        raise UsageError(
            "--each lists the nodes of a cluster that runs Slurm or Kubernetes.",
            remedy="tightfit hardware --on slurm --each, or without --each",
        )
    cluster = resolve_hardware(text)
    if flags.as_json:
        show_json(cluster.model_dump(mode="json"))
        return
    from tightfit.cli.render.hardware import show_cluster

    show_cluster(cluster)


def _show_inventory(flags: HardwareFlags, inventory: Inventory) -> None:
    if flags.as_json:
        show_json(describe_inventory(inventory))
        return
    from tightfit.cli.render.inventory import show_inventory

    show_inventory(inventory, is_each=flags.each)


def describe_inventory(inventory: Inventory) -> dict[str, Any]:
    """The JSON of an inventory: partitions by kind of node, each node, and what is planned over."""
    from tightfit.hardware.plannable import plan_over

    try:
        cluster = plan_over(inventory)
    except EnvironmentFaultError:  # nothing takes jobs; what there is can be shown all the same
        cluster = Cluster(groups=(), source=inventory.source, warnings=inventory.warnings)
    rows = list_rows(inventory)
    return {
        **cluster.model_dump(mode="json"),
        "totals": dataclasses.asdict(count_totals(inventory)),
        "partitions": [
            {
                **dataclasses.asdict(pool),
                "kinds": [_describe_row(row) for row in rows if row.pool.name == pool.name],
            }
            for pool in inventory.pools
        ],
        "nodes": [_describe_node(node) for node in inventory.nodes],
    }


def _describe_row(row: InventoryRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "num_nodes": len(row.nodes),
        "num_free_nodes": row.num_free_nodes,
        "num_gpus": row.num_gpus,
        "num_free_gpus": row.num_free_gpus,
        "num_free_cores": row.num_free_cores,
        "states": {state.value: number for state, number in row.states.items()},
        "nodes": [node.name for node in row.nodes],
    }


def _describe_node(node: ClusterNode) -> dict[str, Any]:
    gpus = [
        {"kind": one.kind, "gpu": one.name, "count": one.count, "num_free": one.num_free}
        for one in node.devices
    ]
    told = dataclasses.asdict(node)
    del told["devices"]
    return {**told, "state": node.state.value, "takes_jobs": node.state.takes_jobs, "gpus": gpus}
