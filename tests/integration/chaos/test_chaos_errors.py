"""What users bring about: one message, one remedy, the exit code of its kind, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_jobs import PATIENCE_SECONDS, Job

pytest_plugins = ("chaos_fixtures",)

EXIT_NOT_FOUND, EXIT_INVALID, EXIT_ENVIRONMENT, EXIT_DIVERGED = 3, 4, 6, 7


def copy_model(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    return folder


def said_once(text: str) -> str:
    """The one error message of a command."""
    assert "Traceback" not in text, text
    assert text.count("error: ") == 1, text
    assert text.count("  try: ") == 1, text
    return text[text.index("error: ") :]


@pytest.mark.parametrize("on", ["cpu", "2xcpu"])
def test_weights_that_are_not_finite(tmp_path: Path, model: Path, data: Path, on: str) -> None:
    from safetensors.numpy import load_file, save_file

    broken = copy_model(model, tmp_path / "model")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = np.inf
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    job = Job(home=tmp_path / "job", model=broken, data=data).write()

    said = said_once(job.finish("--on", on, code=EXIT_DIVERGED))

    assert "first batch is nan" in said
    assert "layers.1.mlp.down_proj" in said
    assert "fetch the model's files again" in said
    assert job.losses() == {}
    assert job.state()["status"] == "failed"
    if on == "cpu":
        again = said_once(job.finish("--on", on, code=EXIT_DIVERGED))
        assert again == said, "the second time it is as clear as the first"


def test_a_loss_that_explodes(tmp_path: Path, model: Path, data: Path) -> None:
    """Finite, and beyond guessing: it need not become NaN to be lost."""
    changes = {
        "method": "full",
        "learning_rate": 10.0,
        "schedule": "constant",
        "warmup_fraction": 0.3,
        "max_steps": 40,
        "save_every": 1,
    }
    job = Job(home=tmp_path, model=model, data=data, changes=changes).write()

    said = said_once(job.finish(code=EXIT_DIVERGED))

    last = job.last_step()
    assert last >= 1
    assert f"Stopped at step {last + 1}" in said
    assert f"{data.name}" in said
    assert sorted(job.losses()) == list(range(1, last + 1))
    assert job.state()["status"] == "failed"
    assert job.checkpoints()[-1] == f"step-{last:06d}"
    again = said_once(job.finish(code=EXIT_DIVERGED))
    assert f"Stopped at step {last + 1}" in again, "what it resumes from is no cleaner"


@pytest.mark.parametrize("error", ["truncated", "missing"])
def test_weights_file(tmp_path: Path, model: Path, data: Path, error: str) -> None:
    broken = copy_model(model, tmp_path / "model")
    path = broken / "model.safetensors"
    if error == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    job = Job(home=tmp_path / "job", model=broken, data=data).write()

    process = job.start()
    text, _ = process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode in (EXIT_NOT_FOUND, EXIT_INVALID), text
    assert str(broken) in said_once(text)


def test_data_file_missing(tmp_path: Path, model: Path) -> None:
    absent = tmp_path / "nowhere.jsonl"
    job = Job(home=tmp_path / "job", model=model, data=absent).write()

    assert str(absent) in said_once(job.finish(code=EXIT_NOT_FOUND))


def change_tokenizer(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "tokenizer_config.json"
    held = json.loads(path.read_text())
    for key, value in change.items():
        held.pop(key, None)
        if value is not None:
            held[key] = value
    path.write_text(json.dumps(held))


def test_no_pad_token_and_no_marks(tmp_path: Path, model: Path, data: Path) -> None:
    """Both can be made up for: the losses are those of the tokenizer that has them."""
    plain = copy_model(model, tmp_path / "model")
    change_tokenizer(plain, {"pad_token": None})
    config = json.loads((plain / "config.json").read_text())
    del config["pad_token_id"]
    (plain / "config.json").write_text(json.dumps(config))
    template = plain / "chat_template.jinja"
    text = template.read_text()
    unmarked = text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert unmarked != text
    template.write_text(unmarked)
    changes = {"max_steps": 3}
    whole = Job(home=tmp_path / "whole", model=model, data=data, changes=changes).write()
    bare = Job(home=tmp_path / "bare", model=plain, data=data, changes=changes).write()

    whole.finish()
    bare.finish()

    assert len(whole.losses()) == 3
    assert bare.losses() == pytest.approx(whole.losses(), abs=1e-6)


NEEDS_MOUNT = "run as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1"


def in_own_mounts(script: str, job: Job) -> subprocess.CompletedProcess[str]:
    """A shell that may mount what nobody else sees."""
    allowed = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(job.home)],
        capture_output=True,
        check=False,
    )
    if allowed.returncode:
        pytest.skip(f"mounting is not permitted; un-skip: {NEEDS_MOUNT}")
    return subprocess.run(
        ["unshare", "-rm", "bash", "-eu", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=job.surroundings() | {"RUN": str(job.run), "KEPT": str(job.home / "kept")},
        timeout=2 * PATIENCE_SECONDS,
    )


FILL = """
mkdir -p $RUN && mount -t tmpfs -o size=4m none $RUN
code=0
{command} > $KEPT.1 2>&1 &
pid=$!
until [ -d $RUN/checkpoints/step-000003 ]; do sleep 0.02; kill -0 $pid; done
cat /dev/zero > $RUN/ballast 2> /dev/null || true
wait $pid || code=$?
echo first $code
rm -rf $KEPT.run && cp -r $RUN $KEPT.run
rm $RUN/ballast
code=0
{command} > $KEPT.2 2>&1 || code=$?
echo second $code
rm -rf {run_copy} && mkdir -p {run_copy} && cp -r $RUN/. {run_copy}
"""


def test_full_disk(tmp_path: Path, model: Path, data: Path) -> None:
    changes = {"max_steps": 60, "save_every": 3}
    reference = Job(home=tmp_path / "reference", model=model, data=data, changes=changes).write()
    job = Job(home=tmp_path / "job", model=model, data=data, changes=changes).write()
    command = " ".join(job.command())

    done = in_own_mounts(FILL.format(command=command, run_copy=tmp_path / "copy" / "run"), job)
    first, second = (job.home / "kept.1").read_text(), (job.home / "kept.2").read_text()

    assert "first 6" in done.stdout, done.stderr + first
    assert "No space left on device" in said_once(first)
    assert "second 0" in done.stdout, second
    assert "resumed after step" in second
    reference.finish()
    assert read_losses(tmp_path / "copy" / "run") == reference.losses()


FULL_AT_THE_END = """
mkdir $KEPT.old && cp -r $RUN/. $KEPT.old
mount -t tmpfs -o size=8m none $RUN && cp -r $KEPT.old/. $RUN
cat /dev/zero > $RUN/ballast 2> /dev/null || true
truncate -s -65536 $RUN/ballast
code=0
{command} > $KEPT.1 2>&1 || code=$?
echo first $code
rm $RUN/ballast
code=0
{command} > $KEPT.2 2>&1 || code=$?
echo second $code
ls $RUN/adapter
ls $RUN
"""


def test_full_disk_at_the_end(tmp_path: Path, model: Path, data: Path) -> None:
    """Every step is done, and only the result does not fit."""
    changes = {"max_steps": 2, "save_every": 1, "keep_checkpoints": 1}
    job = Job(home=tmp_path / "job", model=model, data=data, changes=changes).write()
    job.finish()
    shutil.rmtree(job.run / "adapter")
    state = json.loads((job.run / "state.json").read_text())
    (job.run / "state.json").write_text(json.dumps(state | {"status": "stopped"}))

    done = in_own_mounts(FULL_AT_THE_END.format(command=" ".join(job.command())), job)
    first = (job.home / "kept.1").read_text()

    assert "first 6" in done.stdout, done.stderr + first
    assert "No space left on device" in said_once(first)
    assert "second 0" in done.stdout, (job.home / "kept.2").read_text()
    assert "adapter_model.safetensors" in done.stdout
    assert ".partial" not in done.stdout


def read_losses(run: Path) -> dict[int, float]:
    return Job(home=run.parent, model=run, data=run).losses()


READ_ONLY = """
mkdir -p $RUN
mount --bind $RUN $RUN && mount -o remount,ro,bind $RUN
code=0
{command} > $KEPT.1 2>&1 || code=$?
echo $code
"""


@pytest.mark.parametrize("is_begun", [False, True])
def test_read_only_folder(tmp_path: Path, model: Path, data: Path, is_begun: bool) -> None:
    changes = {"max_steps": 2}
    job = Job(home=tmp_path / "job", model=model, data=data, changes=changes).write()
    if is_begun:
        job.finish()
        state = json.loads((job.run / "state.json").read_text())
        (job.run / "state.json").write_text(json.dumps(state | {"status": "stopped"}))

    done = in_own_mounts(READ_ONLY.format(command=" ".join(job.command())), job)
    text = (job.home / "kept.1").read_text()

    assert done.stdout.strip() == str(EXIT_ENVIRONMENT), done.stderr + text
    assert "Cannot write in" in said_once(text)
