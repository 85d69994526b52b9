"""`tightfit submit --on k8s` from a recipe to a server that keeps what it is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_cases import make_plan
from kubernetes_server import ApiServer, make_node, make_pod

from small_models import make_llama, make_tokenizer
from tightfit.api.options.clusters import SubmitOptions
from tightfit.api.submit import submit
from tightfit.cli.app import main
from tightfit.core.errors import UsageError
from tightfit.core.recipe import Recipe
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

QUESTION = {"prompt": "How many singers are there?", "completion": "SELECT count(*) FROM singer;"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "models" / "tiny"
    make_llama(folder)
    make_tokenizer(folder)
    return folder


@pytest.fixture
def server() -> Iterator[ApiServer]:
    found = ApiServer()
    found.start()
    yield found
    found.stop()


class World:
    """A shared folder, a site and a kubeconfig; `submit` runs in this process."""

    def __init__(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model = model
        self.shared = model.parents[1]
        self.data = self.shared / "train.jsonl"
        self.run = self.shared / "runs" / "mine"
        self._capsys = capsys

    def submit(self, *words: str, on: str = "k8s") -> tuple[int, str, str]:
        self._capsys.readouterr()
        line = ["submit", str(self.model), "--data", str(self.data), "--max-steps", "4"]
        code = main([*line, "--output", str(self.run), "--on", on, *words])
        out, err = self._capsys.readouterr()
        return code, out, err

    def plain(self, *words: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = main(list(words))
        out, err = self._capsys.readouterr()
        return code, out, err


@pytest.fixture
def world(
    model: Path,
    server: ApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> World:
    found = World(model, capsys)
    found.shared = tmp_path / "shared"
    found.shared.mkdir()
    (found.shared / "models").symlink_to(model.parent)
    found.model = found.shared / "models" / model.name
    found.data = found.shared / "train.jsonl"
    found.data.write_text((json.dumps(QUESTION) + "\n") * 40)
    found.run = found.shared / "runs" / "mine"
    volume = {"name": "shared", "claim": "team", "mount": "/data", "local": str(found.shared)}
    there = {"name": "there", "claim": "far", "mount": "/far"}
    ours = {"image": "registry.example.org/tightfit:0.1-cuda", "volumes": [volume, there]}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"kubernetes": ours}))
    server.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIGHTFIT_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "ledger.sqlite"))
    server.lists["/api/v1/nodes"] = [
        make_node("a", "Tesla-T4", gpus=2),
        make_node("b", "NVIDIA-A100-SXM4-40GB", gpus=2),
    ]
    for claim in ("team", "far"):
        path = f"/api/v1/namespaces/team/persistentvolumeclaims/{claim}"
        server.objects[path] = {"spec": {"accessModes": ["ReadWriteMany"]}}
    return found


def jobs(server: ApiServer) -> list[Any]:
    return [found for path, found in server.objects.items() if "/jobs/" in path]


def test_from_recipe_to_job(world: World, server: ApiServer) -> None:
    code, out, err = world.submit("--no-follow", "--json")

    assert code == 0, err
    answer = json.loads(out)
    (job,) = jobs(server)
    assert job["metadata"]["name"] == answer["job"]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][:2] == ["train", str(world.run)]
    product = pod["nodeSelector"]["nvidia.com/gpu.product"]
    assert product in ("Tesla-T4", "NVIDIA-A100-SXM4-40GB")  # not any GPU of the cluster
    assert RunFolder(path=world.run).read_plan().strategy.num_nodes == 1
    kept = list(yaml.safe_load_all((world.run / "job.yaml").read_text()))
    assert kept == answer["objects"]
    tokens = Path(RunFolder(path=world.run).read_tokens().train)
    assert tokens.is_relative_to(world.run)  # pods see it too


def test_the_same_again_follows_the_job_that_runs(world: World, server: ApiServer) -> None:
    assert world.submit("--no-follow")[0] == 0
    (job,) = jobs(server)
    name = job["metadata"]["name"]
    run = RunFolder(path=world.run)
    plan = run.plan_path.read_bytes()
    job["status"] = {}
    num_looks = 0

    def end(path: str) -> None:
        nonlocal num_looks
        num_looks += path.endswith(f"/jobs/{name}")
        if num_looks == 2:
            server.lists["/api/v1/namespaces/team/pods"] = [make_pod("p", 0, "Succeeded")]
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

    server.on_get = end
    code, _, err = world.submit()
    assert code == 0, err
    assert "pod 0 is done" in err
    assert run.plan_path.read_bytes() == plan
    assert len([one for one in server.requests if one.method == "PATCH"]) == 1


def test_a_failed_job_says_what_the_run_said(world: World, server: ApiServer) -> None:
    assert world.submit("--no-follow")[0] == 0
    (job,) = jobs(server)
    reported = {"problem": "The loss is not finite.", "remedy": "--lr 1e-5", "exit_code": 7}
    state = RunState(status=RunStatus.FAILED, updated_at="2026-01-01T00:00:00+00:00", **reported)
    RunFolder(path=world.run).write_state(state)
    num_looks = 0

    def end(path: str) -> None:
        nonlocal num_looks
        num_looks += "/jobs/" in path
        if num_looks == 2:
            job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}

    server.on_get = end
    code, _, err = world.submit()
    assert code == 7
    assert "The loss is not finite." in err


def test_cancelled_by_its_run_or_its_name(world: World, server: ApiServer) -> None:
    for named in ("run", "name"):
        assert world.submit("--no-follow")[0] == 0
        (job,) = jobs(server)
        words = [str(world.run)] if named == "run" else [job["metadata"]["name"], "--on", "k8s"]
        code, out, err = world.plain("cancel", *words, "--json")
        assert code == 0, err
        assert json.loads(out)["job_id"] == job["metadata"]["name"]
        assert jobs(server) == []

    code, out, _ = world.plain("cancel", str(world.run))
    assert code == 0
    assert "Nothing to cancel" in out
    server.objects["/apis/batch/v1/namespaces/team/jobs/theirs"] = {"metadata": {"name": "theirs"}}
    code, _, err = world.plain("cancel", "theirs", "--on", "k8s")
    assert (code, len(jobs(server))) == (2, 1), err


def test_dry_run_changes_nothing(world: World, server: ApiServer) -> None:
    code, out, err = world.submit("--dry-run")
    assert code == 0, err
    assert "kind: Job" in out
    assert "Nothing was submitted" in out
    assert not jobs(server)
    assert not world.run.exists()


def test_words_need_no_cluster(
    world: World, server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, out, err = world.submit("--dry-run", "--json", on="k8s:2xT4")
    assert code == 0, err
    assert json.loads(out)["plan"]["hardware"]["node"]["gpu"]["name"] == "Tesla T4"
    assert server.requests == []
    code, _, err = world.submit("--dry-run")
    assert code == 3
    assert "No Kubernetes cluster is configured" in err


def test_what_is_written_comes_with_the_warnings_of_a_dry_run(world: World, tmp_path: Path) -> None:
    shown = []
    for words in (["--dry-run"], ["--write", str(tmp_path / "job.yaml")]):
        code, out, err = world.submit(*words, on="k8s:2xT4")
        assert code == 0, err
        shown.append(" ".join(out.split()))
    assert all("no node label is known that keeps the pods on Tesla T4" in text for text in shown)


def test_a_run_that_pods_would_not_see(world: World, tmp_path: Path) -> None:
    world.run = tmp_path / "elsewhere"
    code, _, err = world.submit()
    assert code == 3
    assert "No pod would see the run folder" in err
    assert "kubernetes.volumes" in err
    assert not world.run.exists()


def test_a_model_that_pods_would_not_see(world: World, model: Path) -> None:
    world.model = model
    code, _, err = world.submit()
    assert code == 3
    assert "No pod would see the model" in err


def test_a_template_of_the_recipe_that_pods_would_not_see(world: World, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    recipe = tmp_path / "recipe.yaml"
    stated = {"model": str(world.model), "data": str(world.data), "template": str(template)}
    recipe.write_text(yaml.safe_dump({**stated, "output": str(world.run)}))
    code, _, err = world.plain("submit", str(recipe), "--on", "k8s", "--dry-run")

    assert code == 3, err
    assert f"No pod would see the template {template}" in err


def test_options_of_slurm_are_refused(world: World) -> None:
    code, _, err = world.submit("--account", "me")
    assert code == 2
    assert "`--account` is for Slurm" in err


def test_a_saved_plan_travels_to_a_folder_that_only_pods_see(
    world: World, server: ApiServer, tmp_path: Path
) -> None:
    recipe = Recipe.model_validate({"model": "gpt2", "method": "lora", "on": "T4"})
    plan = make_plan(recipe, nodes=1).model_copy(update={"training": None})
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    line = ["submit", "plan.json", "--on", "k8s", "--output", "/far/runs/x", "--no-follow"]
    code, _, err = world.plain(*line)
    assert code == 2
    assert "--data" in err
    code, _, err = world.plain(*line, "--data", "/far/train.jsonl", "--stage")
    assert (code, jobs(server)) == (2, [])
    assert "leave out --stage" in err
    code, _, err = world.plain(*line, "--data", "/far/train.jsonl", "--lr", "0.001")
    assert code == 0, err
    (job,) = jobs(server)
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    expected = "train /etc/tightfit/plan.json --data /far/train.jsonl --output /far/runs/x"
    assert words == [*expected.split(), "--lr", "0.001"]
    (config,) = (found for path, found in server.objects.items() if "/configmaps/" in path)
    assert json.loads(config["data"]["plan.json"])["model"]["name"] == plan.model.name
    assert config["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


def test_a_carried_plan_names_its_model_as_pods_see_it(
    world: World, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.shared)
    plan = str(tmp_path / "plan.json")
    code, _, err = world.plain("plan", "models/tiny", "--on", "T4", "--save", plan)
    assert code == 0, err
    line = ["submit", plan, "--on", "k8s", "--output", "/far/runs/x", "--data", "/far/a.jsonl"]
    code, _, err = world.plain(*line, "--no-follow")
    assert code == 0, err
    (config,) = (found for path, found in server.objects.items() if "/configmaps/" in path)
    assert json.loads(config["data"]["plan.json"])["model"]["name"] == str(world.model)


def test_a_carried_plan_of_a_model_that_pods_would_not_see(
    world: World, server: ApiServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    for name in (model.name, f"./{model.name}", str(model)):
        code, _, err = world.plain("plan", name, "--on", "T4", "--save", "plan.json")
        assert code == 0, err
        line = ["submit", "plan.json", "--on", "k8s", "--output", "/far/runs/x"]
        code, _, err = world.plain(*line, "--data", "/far/a.jsonl", "--no-follow")
        assert code == 3
        assert f"No pod would see {model}" in err
        assert "hub name" in err
    assert not jobs(server)


def test_a_fresh_run_that_fails_leaves_the_old_one(world: World, server: ApiServer) -> None:
    assert world.submit("--no-follow")[0] == 0
    server.objects = {path: it for path, it in server.objects.items() if "/jobs/" not in path}
    before = sorted(world.run.rglob("*"))
    code, _, err = world.submit("--fresh", "--no-follow", "--set", "micro_batch=100000")
    assert code in (2, 5), err
    assert sorted(world.run.rglob("*")) == before
    assert [path.name for path in world.run.parent.iterdir()] == ["mine"]


def test_options_that_only_kubernetes_has(world: World, server: ApiServer, tmp_path: Path) -> None:
    """As the command line gives them."""
    target = tmp_path / "job.yaml"
    given: dict[str, Any] = {"kind": "job", "write": target, "namespace": "other", "stage": True}
    submit(
        SubmitOptions(
            job=str(world.model),
            data=world.data,
            max_steps=4,
            output=world.run,
            on="k8s:T4",
            **given,
        )
    )
    (job,) = yaml.safe_load_all(target.read_text())
    pod = job["spec"]["template"]["spec"]
    assert job["metadata"]["namespace"] == "other"
    assert f"tightfit stage {world.model} " in pod["initContainers"][0]["args"][1]
    assert server.requests == []
    with pytest.raises(UsageError, match="--dry-run"):
        submit(SubmitOptions(job=str(world.run), on="k8s:T4", dry_run=True, **given))
    with pytest.raises(UsageError, match="stage a model"):
        submit(SubmitOptions(job=str(world.run), on="k8s:T4", **{**given, "kind": "trainjob"}))
    with pytest.raises(UsageError, match="no context `far`"):
        submit(SubmitOptions(job=str(world.run), on="k8s", context="far"))
