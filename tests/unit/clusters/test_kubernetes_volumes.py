"""Volumes, names and what a site may get wrong."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_cases import make_job, make_site

from tightfit.clusters.kubernetes.objects import build_training
from tightfit.clusters.kubernetes.pod import (
    User,
    check_site_names,
    choose_mounts,
    escape,
    find_volume,
    name_job,
    require_volume,
)
from tightfit.clusters.site import KubernetesSite, Volume
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError


def volume(name: str, mount: str, local: str | None = None) -> Volume:
    return Volume(name=name, claim=name, mount=mount, local=local)


def test_a_volume_is_seen_under_both_paths_and_written_where_the_run_is() -> None:
    site = KubernetesSite(volumes=(volume("a", "/data", "/mnt/a"), volume("b", "/b", "/b")))
    mounts = choose_mounts(site, written=("/mnt/a/runs/x",))
    found = [(one.volume.name, one.path, one.is_read_only) for one in mounts]
    assert found == [("a", "/data", False), ("a", "/mnt/a", False), ("b", "/b", True)]


def test_of_nested_volumes_the_inner_one() -> None:
    site = KubernetesSite(volumes=(volume("in", "/m/in"), volume("out", "/m")))
    for path, name in (("/m/in/x", "in"), ("/m/in", "in"), ("/m/inner", "out")):
        found = find_volume(site, path)
        assert found is not None
        assert found.name == name
    assert find_volume(site, "/mm/x") is None


def test_an_outer_volume_stays_read_only_where_the_inner_is_written() -> None:
    site = KubernetesSite(
        volumes=(volume("out", "/data", "/mnt/out"), volume("in", "/runs", "/mnt/out/runs"))
    )
    mounts = choose_mounts(site, written=("/mnt/out/runs/x",))
    assert {one.path: one.is_read_only for one in mounts} == {
        "/data": True, "/mnt/out": True, "/runs": False, "/mnt/out/runs": False,
    }  # fmt: skip
    both = choose_mounts(site, written=("/mnt/out/runs/x", "/data/other"))
    assert not any(one.is_read_only for one in both)


def test_a_link_is_named_with_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    site = KubernetesSite(volumes=(volume("a", "/data", str(tmp_path / "shared")),))
    with pytest.raises(NotFoundError, match="is a link to") as caught:
        require_volume(site, str(tmp_path / "link"), "The model")
    assert str(tmp_path / "shared") in caught.value.remedy


@pytest.mark.parametrize(
    ("volumes", "said"),
    [
        ((volume("a", "/tmp"),), "would hide /tmp"),
        ((volume("a", "/x", "/usr/lib"),), "would hide /usr/lib"),
        ((volume("a", "/x"), volume("b", "/x")), "are both /x"),
        ((volume("a", "/x"), volume("a", "/y")), "two volumes called `a`"),
        ((volume("shm", "/x"),), "`shm` cannot be the name"),
        ((volume("My_Data", "/x"),), "`My_Data` cannot be the name"),
    ],
)
def test_what_a_site_may_get_wrong(volumes: tuple[Volume, ...], said: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(said)):
        choose_mounts(KubernetesSite(volumes=volumes))


def test_an_unknown_key_of_a_toleration() -> None:
    with pytest.raises(InvalidInputError, match="`efect`"):
        build_training(make_job("qlora_7b"), make_site(tolerations=({"key": "a", "efect": "x"},)))


def test_no_image() -> None:
    with pytest.raises(InvalidInputError, match="names none") as caught:
        build_training(make_job("qlora_7b"), make_site(image=None))
    assert "docker/Dockerfile.cuda" in caught.value.remedy


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(SetupError, match="not installed") as caught:
        build_training(make_job("qlora_7b"), make_site())
    assert caught.value.remedy == "pip install 'tightfit[cluster]'"


def test_a_folder_of_root_is_written_by_root_alone() -> None:
    job = replace(make_job("qlora_7b"), user=User(uid=0, gid=0))
    (made,) = build_training(job, make_site())
    security = made["spec"]["template"]["spec"]["securityContext"]
    assert (security["runAsUser"], security["runAsGroup"]) == (0, 0)
    assert "runAsNonRoot" not in security


def test_without_requeue_a_pod_is_started_once() -> None:
    (made,) = build_training(replace(make_job("qlora_7b"), can_requeue=False), make_site())
    assert made["spec"]["backoffLimitPerIndex"] == 0
    assert "podFailurePolicy" not in made["spec"]


@pytest.mark.parametrize("text", ["Mine", "7b_Run", "a" * 80, "Ä ö", "x.y/z-", "-"])
def test_names_are_labels_that_leave_room_for_a_number(text: str) -> None:
    for name in (name_job(text), name_job(text, place=f"/runs/{text}")):
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name), name
        assert len(f"{name}-node-0-65535") <= 63


def test_names_tell_places_apart() -> None:
    assert name_job("mine", place="/a/mine") != name_job("mine", place="/b/mine")
    assert name_job("mine", place="/a/mine") == name_job("mine", place="/a/mine")
    assert escape("a$(B)$") == "a$$(B)$$"


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"namespace": "Bad_NS"}, "namespace"),
        ({"namespace": "a.b"}, "namespace"),
        ({"image": "a b"}, "image"),
        ({"secrets": ("A B",)}, "secrets"),
        ({"service_account": "-x"}, "service_account"),
        ({"priority_class": "x" * 254}, "priority_class"),
        ({"queue": "q\n"}, "queue"),
        ({"gpu_resource": "no slash!"}, "gpu_resource"),
        ({"node_selector": {"a b": "c"}}, "node_selector"),
        ({"node_selector": {"a": "c d"}}, "node_selector"),
        ({"volumes": (Volume(name="s", claim="Bad_Claim", mount="/d"),)}, "volumes.claim"),
        ({"volumes": (volume("s", "/da:ta"),)}, "volumes.mount"),
    ],
)
def test_names_that_no_api_server_takes(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(f"`kubernetes.{key}`")):
        check_site_names(make_site().kubernetes.model_copy(update=wrong))


def test_names_that_are_right_pass() -> None:
    labels = {"nvidia.com/gpu.product": "Tesla-V100_1.x", "pool": ""}
    named = {
        "node_selector": labels,
        "secrets": ("hf-token", "a.b-c"),
        "gpu_resource": "amd.com/gpu",
    }
    check_site_names(make_site().kubernetes.model_copy(update=named))
