"""`profiles/nsys.sh` and the steps that it records."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from profiles.steady import WARM_STEPS, record_steps
from tests.profiles.tiny_shape import tiny_batch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "profiles" / "nsys.sh"
BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")


def run(path, *arguments, cwd=ROOT, script=SCRIPT, **environment):
    assert BASH is not None
    return subprocess.run(
        [BASH, str(script), *arguments],
        env={"PATH": str(path), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_nsys_it_says_what_to_install(tmp_path):
    cat = shutil.which("cat")
    assert cat is not None
    (tmp_path / "cat").symlink_to(cat)
    result = run(tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "nsys is not on the PATH" in result.stderr
    assert "nsight-systems-cli" in result.stderr


@pytest.fixture
def path(tmp_path):
    """A PATH whose nsys prints what it is given."""
    fake = tmp_path / "nsys"
    fake.write_text(f'#!{BASH}\nprintf "%s\\n" "$ENCORE_NVTX" "$PWD" "$@"\n')
    fake.chmod(0o755)
    return os.pathsep.join((str(tmp_path), os.environ["PATH"]))


def test_arguments_go_on_and_graphs_are_traced_by_node(path, tmp_path):
    result = run(path, "--model", "a b", "--steps", "3", cwd=tmp_path, PYTHON="some-python")
    assert result.returncode == 0, result.stderr
    enabled, directory, profile, *options = result.stdout.splitlines()
    assert (enabled, directory, profile) == ("1", str(ROOT), "profile")
    assert options[-7:] == [
        "some-python",
        "-m",
        "profiles.steady",
        "--model",
        "a b",
        "--steps",
        "3",
    ]
    assert "--cuda-graph-trace=node" in options
    assert "--capture-range=cudaProfilerApi" in options
    assert f"--output={tmp_path}/encore-steady" in options


def test_from_its_own_folder_to_a_place_beside_it(path):
    result = run(path, cwd=SCRIPT.parent, script=SCRIPT.name, OUTPUT="reports/steady")
    assert result.returncode == 0, result.stderr
    _, directory, _, *options = result.stdout.splitlines()
    assert directory == str(ROOT)
    assert f"--output={SCRIPT.parent}/reports/steady" in options


def test_by_a_link_beside_a_python(path, tmp_path):
    link = tmp_path / "record"
    link.symlink_to(SCRIPT)
    (tmp_path / "profiles").mkdir()
    environment = {"PYTHON": "bin/python", "CDPATH": str(tmp_path)}
    result = run(path, cwd=tmp_path, script=link, **environment)
    assert result.returncode == 0, result.stderr
    _, directory, *options = result.stdout.splitlines()
    assert directory == str(ROOT)
    assert f"{tmp_path}/bin/python" in options


def test_the_recorded_steps_are_replays():
    with tiny_batch(tokens=40) as running:
        replays = running.engine.stats().replays
        record_steps(running, 5)
        assert running.engine.stats().replays == replays + WARM_STEPS + 5
