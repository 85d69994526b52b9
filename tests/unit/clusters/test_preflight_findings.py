"""What is made of what the nodes told: the error, where it is, and the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.clusters.preflight.findings import render_bits
from tightfit.clusters.preflight.gather import PreflightReport, make_preflight_report
from tightfit.clusters.preflight.observations import (
    AllReduceResult,
    ClockOffset,
    ConnectionOutcome,
    ConnectionProbe,
    DatagramCount,
    FolderObservations,
    FolderStep,
    ListenerPorts,
    NameLookup,
    NetworkDevice,
    NodeFacts,
    Observations,
    Route,
    StreamResult,
    TorchFacts,
    addresses_on,
    choose_addresses,
)
from tightfit.core.findings import Finding, Status

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
NOTHING = DatagramCount(sender=0, num_small=0, num_large=0)


def make_facts(node: str, **changes: Any) -> NodeFacts:
    held: dict[str, Any] = {
        "hostname": node,
        "python": "3.11.7",
        "packages": {"tightfit": "1.0", "torch": "2.13.0", "peft": "0.21", "NCCL": None},
        "devices": (
            NetworkDevice(name="lo", is_up=True, mtu=65_536, addresses=("127.0.0.1/8",)),
            NetworkDevice(name="eth0", is_up=True, mtu=1500, addresses=(f"{ADDRESSES[node]}/24",)),
            NetworkDevice(name="docker0", is_up=True, mtu=1500, addresses=("172.17.0.1/16",)),
        ),
        "memory_bytes": 2**36,
        "free_memory_bytes": 2**35,
        "shm_bytes": 2**35,
        "shm_free_bytes": 2**35,
        "disk_free_bytes": 2**40,
        "max_open_files": 65_536,
    }
    return NodeFacts(**(held | changes))


def make_seen() -> Observations:
    """Two nodes with nothing wrong."""
    observed = Observations(nodes=("a", "b"), port=29_500, sent={"a": 200, "b": 200})
    both = (("a", "b"), ("b", "a"))
    observed.facts = {node: make_facts(node) for node in "ab"}
    names = [NameLookup(name=node, addresses=(address,)) for node, address in ADDRESSES.items()]
    observed.lookups = {"a": names, "b": names}
    observed.clocks = {node: ClockOffset(offset_seconds=0.0, error_seconds=0.001) for node in "ab"}
    observed.addresses = observed.defaults = choose_addresses(observed.facts, observed.lookups)
    observed.ports = {node: ListenerPorts(tcp_port=4000, udp_port=4001) for node in "ab"}
    for source, target in both:
        address = ADDRESSES[target]
        route = Route(address=address, source=ADDRESSES[source], device="eth0")
        observed.routes[source] = {address: route}
        observed.probes[(source, target)] = make_knock(target, ConnectionOutcome.OK)
        observed.received[(source, target)] = DatagramCount(sender=0, num_small=200, num_large=4)
        observed.streams[(source, target)] = StreamResult(node=target, bytes_per_second=1.1e9)
    observed.port_probes = {node: make_knock("a", ConnectionOutcome.OK) for node in "ab"}
    observed.torch = {node: TorchFacts(version="2.13.0") for node in "ab"}
    observed.reduce = AllReduceResult(
        backend="gloo", num_bytes=2**20, seconds=0.1, bus_bytes_per_second=1e9
    )
    return observed


def make_knock(node: str, outcome: ConnectionOutcome) -> ConnectionProbe:
    return ConnectionProbe(
        node=node, address=ADDRESSES[node], port=4000, outcome=outcome, rtt_seconds=1e-4
    )


def bad(report: PreflightReport) -> list[Finding]:
    found = [f for f in report.findings if f.status in (Status.WARNING, Status.ERROR)]
    assert all(finding.remedy for finding in found)
    return found


def only(observed: Observations, area: str, status: Status = Status.ERROR) -> Finding:
    report = make_preflight_report(observed)
    assert [(f.area, f.status) for f in bad(report)] == [(area, status)], bad(report)
    assert report.exit_code == (6 if status is Status.ERROR else 0)
    return bad(report)[0]


def test_nothing_is_wrong() -> None:
    report = make_preflight_report(make_seen())

    assert bad(report) == []
    assert report.exit_code == 0
    assert report.nodes[0].options[:4] == ("--nodes", "2", "--rendezvous", "10.0.0.1:29500")


def test_addresses_by_name_by_network_and_by_device() -> None:
    observed = make_seen()
    assert {n: s.address for n, s in observed.addresses.items()} == ADDRESSES
    nameless = choose_addresses(observed.facts, {})
    assert {n: (s.address, s.device) for n, s in nameless.items()} == {
        "a": ("10.0.0.1", "eth0"),
        "b": ("10.0.0.2", "eth0"),
    }
    wrong = [NameLookup(name=node, addresses=("127.0.1.1",)) for node in "ab"]
    assert choose_addresses(observed.facts, {"a": wrong, "b": wrong}) == nameless
    assert set(addresses_on(observed.facts, "docker0")) == {"a", "b"}
    assert addresses_on(observed.facts, "ib0") == {}


def test_the_faster_of_two_networks() -> None:
    def with_ib(node: str, speed: float) -> NodeFacts:
        address = ADDRESSES[node].replace("10.0", "10.9")
        ib = NetworkDevice(
            name="ib0", is_up=True, mtu=2044, bits_per_second=speed, addresses=(f"{address}/24",)
        )
        return make_facts(node, devices=(*make_facts(node).devices, ib))

    node_addresses = choose_addresses({node: with_ib(node, 1e11) for node in "ab"}, {})

    assert {node_address.device for node_address in node_addresses.values()} == {"ib0"}


@pytest.mark.parametrize(
    ("outcome", "word"),
    [(ConnectionOutcome.REFUSED, "refused"), (ConnectionOutcome.TIMEOUT, "without a word")],
)
def test_a_closed_port_and_a_filtered_one_are_told_apart(
    outcome: ConnectionOutcome, word: str
) -> None:
    observed = make_seen()
    observed.port_probes["b"] = make_knock("a", outcome)

    assert word in only(observed, "port").detail


def test_a_taken_port() -> None:
    observed = make_seen()
    observed.ports["a"] = ListenerPorts(
        tcp_port=1, udp_port=1, rendezvous_error="is taken by x (pid 7)"
    )
    finding = only(observed, "port")

    assert "pid 7" in finding.detail
    assert "--port 29501" in str(finding.remedy)


def test_only_the_port_is_open() -> None:
    observed = make_seen()
    observed.probes[("b", "a")] = make_knock("a", ConnectionOutcome.TIMEOUT)
    finding = only(observed, "network")

    assert "only port 29500 is open" in finding.detail
    assert finding.name == "b to a"


def test_one_way() -> None:
    observed = make_seen()
    for pair in list(observed.probes):
        observed.probes[pair] = make_knock(pair[1], ConnectionOutcome.TIMEOUT)
    observed.received[("a", "b")] = NOTHING
    observed.port_probes["b"] = make_knock("a", ConnectionOutcome.TIMEOUT)
    finding = only(observed, "network")

    assert finding.name == "a to b"
    assert finding.detail.startswith("one-way: everything a sends to b is lost")


@pytest.mark.parametrize(("received", "status"), [(196, Status.WARNING), (150, Status.ERROR)])
def test_loss_in_one_direction(received: int, status: Status) -> None:
    observed = make_seen()
    observed.received[("b", "a")] = DatagramCount(sender=1, num_small=received, num_large=4)
    finding = only(observed, "network", status)

    assert "from b to a" in finding.detail
    assert "one-way" in finding.detail


def test_a_firewall_against_datagrams_alone_is_no_error() -> None:
    observed = make_seen()
    observed.received = dict.fromkeys(observed.received, NOTHING)
    report = make_preflight_report(observed)

    assert bad(report) == []
    assert any("UDP is filtered" in finding.detail for finding in report.findings)


def test_loss_is_of_what_was_sent() -> None:
    observed = make_seen()
    observed.sent["b"] = 150
    observed.received[("b", "a")] = DatagramCount(sender=1, num_small=150, num_large=4)
    assert bad(make_preflight_report(observed)) == []

    observed.received[("b", "a")] = DatagramCount(sender=1, num_small=120, num_large=4)
    assert "20.0% of the packets from b to a" in only(observed, "network").detail


def test_nothing_is_said_of_loss_where_a_node_was_silent() -> None:
    observed = make_seen()
    del observed.sent["b"], observed.received[("b", "a")]
    report = make_preflight_report(observed)

    assert bad(report) == []
    assert {link.source: link.lost_fraction for link in report.links} == {"a": 0.0, "b": None}
    assert not any("filtered" in finding.detail for finding in report.findings)

    observed.received[("a", "b")] = DatagramCount(sender=0, num_small=150, num_large=4)
    assert (
        "25.0% of the packets from a to b are lost (not known" in only(observed, "network").detail
    )


def test_nothing_passes_as_far_as_is_known() -> None:
    observed = make_seen()
    for pair in list(observed.probes):
        observed.probes[pair] = make_knock(pair[1], ConnectionOutcome.TIMEOUT)
    observed.port_probes["b"] = make_knock("a", ConnectionOutcome.TIMEOUT)
    observed.received = {("a", "b"): NOTHING}

    assert "nothing passes between them" in only(observed, "network").detail


def test_what_a_busy_node_dropped_is_not_the_networks_loss() -> None:
    observed = make_seen()
    observed.received[("b", "a")] = DatagramCount(
        sender=1, num_small=180, num_large=0, num_dropped=24
    )
    report = make_preflight_report(observed)
    assert bad(report) == []
    assert any("24 datagrams reached a" in finding.detail for finding in report.findings)

    observed.received[("b", "a")] = DatagramCount(
        sender=1, num_small=150, num_large=4, num_dropped=20
    )
    assert "15.0% of the packets from b to a" in only(observed, "network").detail


def test_large_packets() -> None:
    observed = make_seen()
    observed.received[("a", "b")] = DatagramCount(sender=0, num_small=200, num_large=0)

    assert "MTU 1500" in only(observed, "network").detail


def test_sizes_of_packets_that_differ() -> None:
    observed = make_seen()
    observed.addresses = {**observed.addresses, "b": replace(observed.addresses["b"], mtu=9000)}

    assert "a eth0 1500, b eth0 9000" in only(observed, "interface", Status.WARNING).detail


def test_a_wrong_interface_with_the_right_one() -> None:
    observed = make_seen()
    observed.interface = "docker0"
    observed.requested = addresses_on(observed.facts, "docker0")
    for node in "ab":
        observed.routes[node]["172.17.0.1"] = Route(address="172.17.0.1", device="lo")
    finding = only(observed, "interface")

    assert "a reaches docker0 of b (172.17.0.1) through lo" in finding.detail
    assert str(finding.remedy).startswith("--interface eth0")


def test_devices_of_other_names() -> None:
    observed = make_seen()
    observed.addresses = {
        **observed.addresses,
        "b": replace(observed.addresses["b"], device="eno1"),
    }
    observed.routes["b"] = {"10.0.0.1": Route(address="10.0.0.1", device="eno1")}
    report = make_preflight_report(observed)

    assert bad(report) == []
    assert [node.options[-1] for node in report.nodes] == ["eth0", "eno1"]
    assert any("its own --interface" in finding.detail for finding in report.findings)


@pytest.mark.parametrize(
    ("package", "status"),
    [("torch", Status.ERROR), ("tightfit", Status.ERROR), ("NCCL", Status.ERROR),
     ("peft", Status.WARNING)],
)  # fmt: skip
def test_versions_that_differ(package: str, status: Status) -> None:
    observed = make_seen()
    packages = {**observed.facts["b"].packages, package: "0.0.1"}
    observed.facts["b"] = make_facts("b", packages=packages)

    assert "0.0.1 on b" in only(observed, "versions", status).detail


def test_clocks() -> None:
    observed = make_seen()
    observed.clocks["b"] = ClockOffset(offset_seconds=-3.0, error_seconds=0.01)

    assert "a is 3" in only(observed, "clock", Status.WARNING).detail


def test_a_clock_that_is_known_badly_is_not_accused() -> None:
    observed = make_seen()
    observed.clocks["b"] = ClockOffset(offset_seconds=-3.0, error_seconds=1.5)

    assert bad(make_preflight_report(observed)) == []


def test_gpus_that_torch_does_not_see_or_that_differ() -> None:
    observed = make_seen()
    observed.facts["a"] = make_facts("a", gpus=("V100", "V100"))
    assert "the driver shows 2 GPUs" in only(observed, "gpu").detail

    observed = make_seen()
    observed.torch["a"] = TorchFacts(version="2.13.0", num_gpus=1, gpu_names=("T4",))
    assert "a: 1xT4; b: no GPU" in only(observed, "gpu").detail


def test_limits_where_they_matter() -> None:
    observed = make_seen()
    observed.facts["a"] = make_facts("a", max_open_files=1024)
    assert "1024 files" in only(observed, "machine", Status.WARNING).detail

    observed.facts["a"] = make_facts("a", max_locked_bytes=65_536)
    assert bad(make_preflight_report(observed)) == []
    observed.facts["a"] = make_facts("a", max_locked_bytes=65_536, has_infiniband=True)
    assert "InfiniBand" in only(observed, "machine", Status.WARNING).detail


def test_a_slow_network_with_the_option_for_plans() -> None:
    observed = make_seen()
    observed.streams[("a", "b")] = StreamResult(node="b", bytes_per_second=1.25e8)
    finding = only(observed, "bandwidth", Status.WARNING)

    assert "1 Gb/s, where plans assume 10 Gb/s" in finding.detail
    assert "--network 1Gb/s" in str(finding.remedy)


def test_an_all_reduce_that_fails() -> None:
    observed = make_seen()
    observed.reduce = AllReduceResult(backend="gloo", error="[/pytorch/x.cc:78] Timed out")

    assert only(observed, "bandwidth").detail.endswith("over eth0: Timed out")


def test_a_folder_where_two_win() -> None:
    observed = make_seen()
    won = FolderStep(is_done=True, won=("exclusive", "linked"))
    done = FolderStep(is_done=True)
    observed.folder = FolderObservations(
        path="/x", planted=done, found={"b": done}, grown={"b": done}
    )
    observed.folder.raced = {"a": won, "b": won.model_copy(update={"won": ("linked",)})}
    assert "linking a file to a name" in only(observed, "folder").detail

    observed.folder.raced["b"] = done
    observed.folder.grown["b"] = FolderStep(is_done=True, seconds=3.2)
    assert "only after 3" in only(observed, "folder", Status.WARNING).detail


def test_nobody_answers() -> None:
    observed = Observations(nodes=("a", "b"), port=1, absent={"a": "no route", "b": "refused"})
    report = make_preflight_report(observed)

    assert report.exit_code == 6
    assert [finding.name for finding in bad(report)] == ["a", "b"]
    assert report.nodes[0].options == ()


@pytest.mark.parametrize(
    ("rate", "text"), [(1.25e9, "10 Gb/s"), (1.4e8, "1.12 Gb/s"), (5e6, "40 Mb/s"), (10, "80 b/s")]
)
def test_rates_as_networks_are_sold(rate: float, text: str) -> None:
    assert render_bits(rate) == text
